"""The calls for notebooks and scripts: simulations, and federations whose coordinator serves or that start here."""
