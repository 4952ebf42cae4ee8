"""An initialised rank that does nothing uses nothing."""

from pathlib import Path

import pytest

from tests.runtime.victims import run_ranks


@pytest.mark.launches
@pytest.mark.limit(150)
def test_an_idle_rank_uses_under_one_percent_of_a_core(tmp_path: Path) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        train(steps=3)
        used = time.process_time()  # of all threads
        time.sleep(3)
        share = (time.process_time() - used) / 3
        (HERE / f"share-{rank}").write_text(str(share))
        """,
    )
    assert outcome.code == 0, outcome.err
    shares = [float(file.read_text()) for file in tmp_path.glob("share-*")]
    assert len(shares) == 2
    assert max(shares) < 0.01
