import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more CUDA devices than there are, and say so."""
    there = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and there < marker.args[0]:
            reason = f"needs {marker.args[0]} CUDA device(s), this machine has {there}"
            item.add_marker(pytest.mark.skip(reason=reason))
