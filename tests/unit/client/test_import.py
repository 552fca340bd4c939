"""What importing the package loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvbridge


def _loaded_after(statements: str) -> set[str]:
    program = f"import sys\n{statements}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_the_package_loads_neither_grpc_nor_torch() -> None:
    """The core can be imported without the SDK's dependencies."""
    assert not {"grpc", "torch"} & _loaded_after("import kvbridge, kvbridge.core.layout")


def test_connecting_does_not_load_torch() -> None:
    """Torch is loaded by whoever touches a tensor, not before."""
    loaded = _loaded_after("import kvbridge\nkvbridge.connect('unix:/nowhere').acquire")
    assert "grpc" in loaded
    assert "torch" not in loaded


def test_publishing_numpy_arrays_does_not_load_torch() -> None:
    """Everything that the SDK imports at module level is free of torch."""
    modules = "bridge batches handoffs publications windows paged sources slots"
    loaded = _loaded_after("\n".join(f"import kvbridge.client.{name}" for name in modules.split()))
    assert "torch" not in loaded


@pytest.mark.parametrize("name", kvbridge.__all__)
def test_every_exported_name_can_be_had(name: str) -> None:
    """What the root promises is there, and is listed."""
    assert getattr(kvbridge, name) is not None
    assert name in dir(kvbridge)


def test_a_name_that_is_not_exported_is_not_there() -> None:
    """The root has no other names."""
    with pytest.raises(AttributeError, match="no attribute 'Keeper'"):
        _ = kvbridge.Keeper  # type: ignore[attr-defined]  # that is the point
