"""With no checkpoint named, a policy is there all the same."""

from dzrobot.policies.dreamzero.bundled import EMBODIMENT, default_checkpoint, is_trained
from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint


def test_the_default_checkpoint_opens_for_its_robot(tmp_path, monkeypatch):
    monkeypatch.setenv("DZROBOT_CACHE", str(tmp_path))
    checkpoint = open_checkpoint(default_checkpoint())
    assert EMBODIMENT in checkpoint.metadata
    assert default_checkpoint() == checkpoint.folder
    # Trained weights come with the package; random ones are written below the cache folder.
    assert is_trained() != any(tmp_path.iterdir())
