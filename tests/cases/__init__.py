"""Checks that run on one rank of any group and any device, shared by the CPU and the GPU tests."""
