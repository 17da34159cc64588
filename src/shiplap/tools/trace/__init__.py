"""Some training steps, recorded: what each rank computed, communicated and waited for, when, and for which layer.

| file | what it does |
|---|---|
| `spans.py` | what can be recorded, and the names of it |
| `recorder.py` | the observer: notes spans on the host, on the CPU with the time at which communication was finished |
| `watchers.py` | threads that wait for communication, so that its end has a time |
| `layers.py` | which module is running, from hooks |
| `slices.py` | spans as slices of lanes, by the host's clock |
| `device.py` | slices of what ran on a CUDA device, from what PyTorch's profiler wrote |
| `clocks.py` | one clock for all ranks |
| `chrome.py` | the trace file |
| `exposure.py`, `table.py`, `chart.py` | exposed communication by layer and by step: numbers, table, picture |
| `run.py` | one rank's part of it |
"""
