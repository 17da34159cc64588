"""Communication that runs at the same time as the GEMM that uses or makes it."""
