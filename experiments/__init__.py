"""The papers' experiments: what is run, what was published, and both side by side.

`definition` reads an experiment from the catalogue, `runner` runs its cells through the simulator, `results` keeps what
came out, `tables` and `plots` show it beside the published numbers.
"""
