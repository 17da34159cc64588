"""`shiplap verify`: are the parallel layers right on these machines, with these devices and this PyTorch?

| file | what it knows |
|---|---|
| `plans` | which plans there are to check |
| `cases` | which cases, and how close is close |
| `solution` | what a problem needs: random numbers, shards, layers with a plan, modes |
| `layer`, `chain` | the two problems, sharded and unsharded |
| `verdict` | what each rank finds, and what they say together |
| `table` | how it is shown |
| `run` | one rank's part of it all |
"""
