"""The steps that `make bench` times."""

import pytest

from benchmarks import side


@pytest.mark.parametrize("method", ["full", f"full{side.PLAINLY}"])
def test_a_step_of_fit_runs_outside_of_it(method):
    step = side.step_of(method, "wrn1", 2, 32)
    step()
    step()
