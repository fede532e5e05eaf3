import pytest


@pytest.fixture(scope="package", autouse=True)
def curves(tmp_path_factory):
    """The folder for TensorBoard, which a run sets for all later ones of its process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path_factory.mktemp("curves")))
        yield
