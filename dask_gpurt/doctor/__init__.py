"""`dask gpurt doctor`: checks of a node, each with what it found, what was expected, and the remedy.

`finding` is what a check says, `check` how it is run, `registry` the list of all. Each other module looks at one thing.
"""
