"""The tests, in rooms named like the packages that they test; what several rooms use is here."""
