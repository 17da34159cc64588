"""What overlap gains for a model on these ranks, measured: for each pass of each layer, and for whole parts of a block.

| file | what it knows |
|---|---|
| `subject.py` | what is measured together, in turns |
| `layers.py`, `parts.py` | the subjects: passes of kinds of layers, and parts of kinds of blocks |
| `peers/` | others that do the same with other code |
| `result.py` | medians, ratios, and how much is hidden |
| `table.py`, `figure.py` | how it is shown |
| `run.py` | one rank's part of it all |
"""
