import pytest
import torch

torch.set_num_threads(1)  # tests run beside one another; small networks gain nothing from more


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory):
    """Graphs of tests' networks go where pytest cleans up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BITGRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=[1, 2])
def threads(request):
    """How many threads compiled loops run in."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
