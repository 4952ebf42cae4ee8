from hpctrain.cluster.resources import num_cards


def card(folder, name, *states):
    (folder / name).mkdir(parents=True)
    for i, state in enumerate(states, start=1):
        (folder / name / f"ports/{i}").mkdir(parents=True)
        (folder / name / f"ports/{i}/state").write_text(f"{state}\n")


def test_only_cards_with_a_live_port_count(tmp_path):
    card(tmp_path / "infiniband", "mlx5_0", "4: ACTIVE")
    card(tmp_path / "infiniband", "mlx5_1", "1: DOWN", "4: ACTIVE")
    card(tmp_path / "infiniband", "mlx5_2", "1: DOWN")
    card(tmp_path / "cxi", "cxi0")
    assert num_cards((tmp_path / "infiniband", tmp_path / "cxi")) == 3


def test_a_host_without_fast_cards_has_its_ethernet(tmp_path):
    card(tmp_path, "mlx5_0", "1: DOWN")
    assert num_cards((tmp_path,)) == 1
    assert num_cards((tmp_path / "missing",)) == 1
