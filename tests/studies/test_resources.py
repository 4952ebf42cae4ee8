"""Resources of a repeat, computed from samples of its ranks."""

import json

import pytest

from hpctrain.studies.resources import RankSamples, resources_of


def write(path, samples):
    """Write samples between records of steps, as the ranks do."""
    lines = [{"step": 0, "at": 1.0, "samples": 4}, *samples]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ranks_of(folder, hosts, changes, begin=10.5, end=12.5):
    """Return samples at the seconds 9 to 14 of a rank on each host; ``changes`` by rank."""
    found = []
    for rank, host in enumerate(hosts):
        samples = [
            {
                "sampled_at": float(second),
                "read_total": 100 * second,
                "written_total": 7 * second,
                "cpu_s": 0.5 * second,
                "busy_s": 2.0 * second,
                "host_memory_bytes": 1000 * second,
                **changes(rank, second),
            }
            for second in range(9, 15)
        ]
        path = write(folder / f"{host}-{rank}.jsonl", samples)
        found.append(RankSamples.read(path, begin, end))
    return found


def nothing(_rank, _second):
    return {}


def test_samples_from_the_last_before_to_the_first_after_the_steps_count(tmp_path):
    [rank] = ranks_of(tmp_path, ["a-b"], nothing)
    assert [each["sampled_at"] for each in rank.samples] == [10, 11, 12, 13]
    assert rank.host == "a-b"
    path = tmp_path / "a-b-0.jsonl"
    everything = RankSamples.read(path, 0.0, 99.0).samples
    assert [each["sampled_at"] for each in everything] == [9, 10, 11, 12, 13, 14]


def test_bytes_are_per_step_over_all_ranks_and_memory_is_the_largest(tmp_path):
    found = resources_of(ranks_of(tmp_path, ["a", "a", "b"], nothing), mean_step_s=0.5)
    assert found["read_bytes"] == pytest.approx(3 * 100 * 0.5)
    assert found["written_bytes"] == pytest.approx(3 * 7 * 0.5)
    assert found["host_memory_bytes"] == 13000
    assert not {"power_w", "gpu", "gpu_busy", "mhz"} & found.keys()


def test_other_work_is_what_the_ranks_of_the_worst_host_did_not_use(tmp_path):
    def changes(rank, second):
        return {"busy_s": second * (4.0 if rank == 2 else 1.1), "mhz": 2000.0 + rank}

    found = resources_of(ranks_of(tmp_path, ["a", "a", "b"], changes), 1.0)
    assert found["other_cores"] == pytest.approx(4.0 - 0.5)
    assert found["mhz"] == pytest.approx(2001.0)


@pytest.mark.parametrize(
    ("node", "source", "watts"),
    [
        ({"node_source": "Cray pm_counters"}, "Cray pm_counters", 700 + 700),
        ({"node_source": "RAPL"}, "NVML and RAPL", 700 + 700 + 2 * 50 + 60),
        (None, "NVML", 2 * 50 + 60),
    ],
)
def test_power_is_of_each_node_once_and_of_each_gpu_once(tmp_path, node, source, watts):
    def changes(rank, second):
        # Ranks 1 and 2 of host a share a GPU.
        gpu = {"gpu_id": f"GPU-{min(rank, 1)}", "gpu": "H200", "gpu_source": "NVML"}
        gpu |= {"gpu_w": 60.0 if rank == 3 else 50.0, "gpu_busy": 0.2 * rank}
        energy = {} if node is None else {"node_joules": 700.0 * second, **node}
        return gpu | energy

    found = resources_of(ranks_of(tmp_path, ["a", "a", "a", "b"], changes), 1.0)
    assert found["power_w"] == pytest.approx(watts)
    assert found["power_source"] == source
    assert found["gpu_busy"] == pytest.approx(0.3)
    assert found["gpu"] == "H200"


@pytest.mark.parametrize("source", ["RAPL", "Cray pm_counters"])
def test_power_is_unknown_if_a_sample_lacks_that_of_a_gpu(tmp_path, source):
    def changes(rank, second):
        gpu = {"gpu_id": f"GPU-{rank}", "gpu_source": "NVML", "gpu_w": 50.0}
        found = {"node_joules": 700.0 * second, "node_source": source}
        return found if (rank, second) == (1, 12) else found | gpu

    found = resources_of(ranks_of(tmp_path, ["a", "a"], changes), 1.0)
    assert found.get("power_w") == (None if source == "RAPL" else pytest.approx(700))


def test_a_counter_that_a_rank_lacks_gives_no_value(tmp_path):
    def changes(rank, second):
        return {"gpu_busy": 0.5} if rank == 0 or second == 9 else {}

    assert "gpu_busy" not in resources_of(ranks_of(tmp_path, ["a", "b"], changes), 1.0)
    assert resources_of([RankSamples("a", [])], 1.0) == {}
    short = ranks_of(tmp_path, ["a"], nothing, begin=14.5, end=14.6)
    assert set(resources_of(short, 1.0)) == {"host_memory_bytes"}  # one sample has no rate
