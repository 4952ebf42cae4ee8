"""Check laws of all codecs: equal bits, exact sums in a node, marks, states, NaN and inf."""

import copy

import pytest
import torch

import hpctrain
import hpctrain.compress.auto
from hpctrain.compress.by_name import CODECS, codec_for
from hpctrain.compress.int8 import Int8
from hpctrain.compress.largest import DeepGradientCompression, TopK
from hpctrain.compress.power_sgd import PowerSGD
from hpctrain.compress.qsgd import QSGD
from hpctrain.compress.sign import OneBit, SignSGD
from hpctrain.core.config import COMPRESSIONS
from hpctrain.core.errors import ConfigError, MismatchError
from tests.compress.nodes import SHAPES, Gradients, drawn, nodes, of_all

LOSSY = {
    "int8": Int8(64),
    "int8 with feedback": Int8(64, error_feedback=True),
    "qsgd": QSGD(4, 128),
    "sign": SignSGD(),
    "one bit": OneBit(),
    "top k": TopK(0.1),
    "dgc": DeepGradientCompression(0.1),
    "power sgd": PowerSGD(2),
}
CODEC = pytest.mark.parametrize("codec", LOSSY.values(), ids=LOSSY)
WORLDS = pytest.mark.parametrize(
    "world",
    [
        {"ranks_per_node": 1},
        {"ranks_per_node": 2},
        {"ranks_per_node": None, "shared_memory": "off"},
    ],
    ids=["nodes of one", "nodes of two", "flat"],
)
AUTO = ("none", "bf16", "int8")
FEEDBACK = ("int8 with feedback", "one bit", "top k", "power sgd")


def distance(got, expected):
    """Return the relative distance of lists of tensors."""
    squared = sum(float((g - e).square().sum()) for g, e in zip(got, expected, strict=True))
    return (squared / sum(float(e.square().sum()) for e in expected)) ** 0.5


@pytest.mark.ranks(2, 3, 4)
@CODEC
@WORLDS
def test_all_ranks_end_with_the_same_bits_and_marks_are_counted(codec, world):
    with nodes(**world) as comm:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            gradients = Gradients(codec_for(codec), comm, dtype=dtype)
            for step in range(3):
                got = gradients.reduce(drawn(comm.rank, step, dtype=dtype), scale=1 / comm.size)
                marks = torch.full((len(SHAPES),), 1.0, dtype=dtype)
                torch.testing.assert_close(gradients.marks, marks)
                assert all(tensor.isfinite().all() for tensor in got)


@pytest.mark.ranks(2, 3, 4)
@CODEC
def test_inside_one_node_nothing_is_coded(codec):
    with nodes(None) as comm:
        coded = Gradients(codec_for(codec), comm)
        whole = Gradients(codec_for("none"), comm)
        assert coded.codec.num_bytes(coded.bucket) == coded.bucket.flat.nbytes
        for step in range(2):
            values = drawn(comm.rank, step)
            for got, exact in zip(coded.reduce(values), whole.reduce(values), strict=True):
                assert torch.equal(got, exact)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", FEEDBACK)
@WORLDS
def test_omitted_values_are_sent_later(name, world):
    """The sum of the received and the stored values is the sum of all gradients."""
    with nodes(**world) as comm:
        gradients = Gradients(codec_for(LOSSY[name]), comm)
        far = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(100):
            arrived = gradients.reduce(drawn(comm.rank, step % 5))
            exact = of_all(comm, lambda rank, step=step: drawn(rank, step % 5))
            for sums, values in ((far, arrived), (total, exact)):
                for one, value in zip(sums, values, strict=True):
                    one.add_(value)
        assert distance(far, total) < 0.2
        if not comm.num_rails:
            return  # one node, where nothing is omitted
        once = Gradients(codec_for(LOSSY[name]), comm).reduce(drawn(comm.rank))
        assert distance(once, of_all(comm, drawn)) > (0.002 if "int8" in name else 0.2)


@pytest.mark.ranks(2, 3, 4)
@CODEC
@WORLDS
def test_a_value_that_is_not_finite_arrives_and_is_not_remembered(codec, world):
    with nodes(**world) as comm:
        gradients = Gradients(codec_for(codec), comm)
        gradients.reduce(drawn(comm.rank))
        broken = drawn(comm.rank, 1)
        if comm.rank == comm.size - 1:
            broken[0][3, 4] = torch.inf
            broken[2][5, 6, 1] = torch.nan
        got = gradients.reduce(broken)
        assert not got[0].isfinite().all()
        assert not got[2].isfinite().all()
        for step in range(2, 5):
            later = gradients.reduce(drawn(comm.rank, step))
            assert all(tensor.isfinite().all() for tensor in later)


@pytest.mark.ranks(2, 3, 4)
@CODEC
def test_state_resumes_with_the_same_bits(codec):
    with nodes(1) as comm:
        first, second = (Gradients(codec_for(codec), comm) for _ in range(2))
        for step in range(3):
            first.reduce(drawn(comm.rank, step))
        state = copy.deepcopy(first.codec.state_dict())
        second.codec.load_state_dict(state)
        for step in range(3, 6):
            values = drawn(comm.rank, step)
            for got, expected in zip(second.reduce(values), first.reduce(values), strict=True):
                assert torch.equal(got, expected)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "codec",
    [*LOSSY.values(), PowerSGD(2, warmup_steps=3)],
    ids=[*LOSSY, "power sgd after a warm-up"],
)
def test_a_new_layout_of_buckets_for_the_same_tensors_changes_nothing(codec):
    with nodes(1) as comm:
        first, second = (Gradients(codec_for(codec), comm) for _ in range(2))
        for step in range(4):
            values = drawn(comm.rank, step)
            if step == 2:
                second.codec.forget()
                second.codec.forget()  # as for a layout without tensors in between
                second = Gradients(second.codec, comm)
            for got, expected in zip(second.reduce(values), first.reduce(values), strict=True):
                assert torch.equal(got, expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", [*FEEDBACK, "dgc"])
def test_unsent_values_are_divided_on_another_number_of_nodes(name):
    """The sum over nodes is unchanged, for each element."""

    def waiting(gradients):
        return gradients.codec.shared_state(gradients.comm)["unsent"]

    with nodes(1) as comm:
        before = Gradients(codec_for(LOSSY[name]), comm)
        for step in range(3):
            before.reduce(drawn(comm.rank, step))
        state = copy.deepcopy(before.codec.shared_state(comm))
    with nodes(2) as comm:
        after = Gradients(codec_for(LOSSY[name]), comm)
        after.codec.load_shared_state(state, comm)
        torch.testing.assert_close(waiting(after), state["unsent"], rtol=1e-12, atol=1e-12)
        assert any(each.any() for each in state["unsent"])
        after.reduce(drawn(comm.rank, 3))
    with nodes(None) as comm:  # nothing is stored on one node
        whole = Gradients(codec_for(LOSSY[name]), comm)
        whole.codec.load_shared_state(state, comm)
        assert not waiting(whole)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["int8", "sign", "one bit", "top k", "power sgd"])
def test_reported_bytes_equal_sent_bytes(name):
    """The rail counts the bytes that the codec reports, times the paths of the exchange."""
    shapes = ((256, 128),)
    with nodes(1) as comm:
        gradients = Gradients(codec_for(LOSSY[name]), comm, shapes, torch.float32)
        gradients.reduce(drawn(comm.rank, 0, shapes, torch.float32))
        before = comm.internode.traffic().rail_bytes
        gradients.codec.allreduce_(gradients.bucket, comm, scale=None).wait()
        sent = comm.internode.traffic().rail_bytes - before
        claimed = gradients.codec.num_bytes(gradients.bucket)
        size = comm.size
        gathered = name == "top k"
        paths = size - 1 if gathered else 2 * (size - 1) / size
        if name == "power sgd":  # short sums are sent in both directions between pairs of ranks
            total = sum(comm.allgather_object(sent)) / size
            assert claimed * paths * 0.97 <= total <= claimed * 2 + 64
            return
        assert sent == pytest.approx(claimed * paths, rel=0.03, abs=64 * size)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("feedback", [False, True])
def test_values_of_many_chunks_are_each_reduced_in_their_place(feedback, monkeypatch):
    monkeypatch.setattr("hpctrain.compress.quantized._CHUNK", 64)
    with nodes(1) as comm:
        gradients = Gradients(Int8(16, error_feedback=feedback), comm)
        for step in range(3):
            got = gradients.reduce(drawn(comm.rank, step))
            exact = of_all(comm, lambda rank, step=step: drawn(rank, step))
            assert distance(got, exact) < 0.02


@pytest.fixture
def hvd():
    """Initialize the world with one rank per node."""
    hpctrain.init(ranks_per_node=1)
    yield hpctrain
    hpctrain.shutdown()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["auto", "int8", "one_bit", "sign", "top_k", "dgc", "power_sgd"])
def test_the_loss_decreases_with_any_codec_and_replicas_stay_equal(hvd, name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.002 if name == "sign" else 0.05)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=name)
    hvd.broadcast_parameters(model.state_dict())
    generator = torch.Generator().manual_seed(hvd.rank())
    losses = []
    for _ in range(40):
        inputs = torch.randn(32, 32, generator=generator)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :4].sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach())))
    hvd.check_replicas(model)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    state = optimizer.codec.state_dict()
    optimizer.codec.load_state_dict(state)
    if state and name != "auto":
        with pytest.raises(ConfigError, match="must be of the same buckets, but the"):
            optimizer.codec.load_state_dict({**state, "more": {"numel": 1}})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("codec", "kind", "message"),
    [
        ("sign", torch.optim.Adam, "divide by the magnitude of gradients"),
        (TopK(0.1, error_feedback=False), torch.optim.SGD, "values that are never among"),
        ("dgc", torch.optim.AdamW, "because the codec applies momentum"),
    ],
)
def test_codecs_that_do_not_converge_warn(hvd, codec, kind, message):
    model = torch.nn.Linear(4, 4)
    with pytest.warns(UserWarning, match=message):
        hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), compression=codec)


@pytest.mark.ranks(2)
def test_adasum_takes_no_codec(hvd):
    model = torch.nn.Linear(4, 4)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"compression of op=Adasum must be .* got 'int8'"):
        hvd.DistributedOptimizer(plain, compression="int8", op=hvd.Adasum)


def test_a_configuration_knows_all_names():
    assert tuple(COMPRESSIONS) == tuple(CODECS)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("seconds", "name"),
    [((1.0, 0.6, 0.4), "int8"), ((1.0, 0.6, 0.8), "bf16"), ((1.0, 0.95, 0.92), "none")],
)
def test_auto_uses_the_codec_that_a_trial_finds_clearly_faster_on_the_slowest_rank(
    monkeypatch, seconds, name
):
    tried = hpctrain.compress.auto._times

    def times(codecs, bucket, comm):
        assert len(tried(codecs, bucket, comm)) == 3
        last = comm.rank == comm.size - 1
        return list(seconds) if last else [0.1, 0.01, 0.001]

    monkeypatch.setattr(hpctrain.compress.auto, "_times", times)
    with nodes(1) as comm:
        codec = Gradients(codec_for("auto"), comm, ((1 << 18,),), torch.float32).codec
        assert codec.name == name
        took = [f"{each} {1e3 * s:.3g} ms" for each, s in zip(AUTO, seconds, strict=True)]
        assert codec.reason == "1.0 MiB between nodes take " + ", ".join(took)
    with nodes(None) as comm:
        codec = Gradients(codec_for("auto"), comm).codec
        assert codec.name == "none"
        assert "all ranks are on one node" in codec.reason


def test_codecs_have_names_and_an_unknown_name_is_reported():
    for name in CODECS:
        assert codec_for(name) is not codec_for(name)
    kept = Int8(32)
    assert codec_for(kept) is not kept
    with pytest.raises(ConfigError, match=r"compression must be one of none, auto, .*got 'int9'"):
        codec_for("int9")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int8(0), "block must be at least 1, got 0"),
        (lambda: Int8(2.5), "block must be an integer"),
        (lambda: QSGD(2.5), "levels must be an integer"),
        (lambda: OneBit(-1), "warmup_steps must be at least 0, got -1"),
        (lambda: OneBit(True), "warmup_steps must be an integer"),
        (lambda: Int8(error_feedback="no"), "error_feedback must be true or false, got 'no'"),
        (lambda: TopK(error_feedback=0), "error_feedback must be true or false"),
        (lambda: PowerSGD(warm_start="no"), "warm_start must be true or false"),
        (lambda: DeepGradientCompression(masks_momentum="no"), "masks_momentum must be true or"),
        (lambda: PowerSGD(2.5), "rank must be an integer"),
        (lambda: PowerSGD(min_gain=-1), "min_gain must be at least 0"),
        (lambda: DeepGradientCompression(0.1, 3.0), "momentum must be at most 1"),
        (lambda: DeepGradientCompression(clip_norm=-1.0), "clip_norm must be above 0"),
        (lambda: DeepGradientCompression(warmup=(2.0,)), "density must be"),
        (lambda: codec_for(Int8), r"compression must be a codec such as Int8\(\), .*got <class"),
        (lambda: codec_for(5), "got 5"),
    ],
)
def test_an_invalid_argument_of_a_codec_raises_in_its_constructor(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


DIFFERENT = {
    "kinds": ("int8", "one_bit"),
    "warm-up": (OneBit(2), OneBit(0)),
    "blocks": (Int8(64), Int8(128)),
    "feedback": (Int8(), Int8(error_feedback=True)),
    "products": (PowerSGD(2), PowerSGD(4)),
    "casts": ("bf16", "fp16"),
    "none": ("int8", None),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("codecs", DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_with_different_codecs_are_an_error_on_all_of_them(hvd, codecs):
    model = torch.nn.Linear(20, 20)
    plain, own = torch.optim.SGD(model.parameters(), lr=0.1), codecs[hvd.rank() > 0]
    with pytest.raises(MismatchError, match=type(codec_for(codecs[0])).__name__):
        hvd.DistributedOptimizer(plain, compression=own)
    with pytest.raises(MismatchError):
        hvd.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), compression=own)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", FEEDBACK)
def test_unsent_values_are_kept_while_no_rank_has_a_gradient_of_the_tensor(name):
    """Otherwise a head that is not trained in a step would lose its part: ``.grad`` stays None."""
    with nodes(1) as comm:
        gradients = Gradients(codec_for(LOSSY[name]), comm)
        got = gradients.reduce(drawn(comm.rank))
        seen = [tensor.clone() for tensor in got]
        for step in range(1, 4):
            values, has = drawn(comm.rank, step), [number != step % 2 for number in range(5)]
            values = [v if here else v.zero_() for v, here in zip(values, has, strict=True)]
            gradients.reduce(values, marks=[float(here) for here in has])
            for tensor, came, here in zip(seen, gradients.tensors, has, strict=True):
                tensor.add_(came if here else 0.0)
        waits = gradients.codec.shared_state(comm)["unsent"]
        for number, (tensor, left) in enumerate(zip(seen, waits, strict=True)):
            given = sum(
                drawn(rank, step)[number]
                for step in range(4)
                for rank in range(comm.size)
                if not step or number != step % 2
            )
            torch.testing.assert_close(tensor.flatten() + left, given.flatten())


@pytest.mark.ranks(2, 3)
def test_momentum_of_uncompressed_tensors_drops_values_that_are_not_finite():
    with nodes(1) as comm:
        gradients = Gradients(DeepGradientCompression(0.1), comm)
        for step in range(4):
            values = drawn(comm.rank, step)
            if step == 1:
                values[1][2] = torch.nan  # a vector
            got = gradients.reduce(values)
            assert all(tensor.isfinite().all() for tensor in got) == (step != 1)


@pytest.mark.ranks(2)
def test_a_state_of_another_factor_rank_resumes():
    with nodes(1) as comm:
        before, after = (Gradients(PowerSGD(rank), comm) for rank in (4, 2))
        for step in range(2):
            before.reduce(drawn(comm.rank, step))
        after.codec.load_state_dict(before.codec.state_dict())
        after.reduce(drawn(comm.rank, 2))
        assert after.codec.state_dict()["0"]["steps"] == 3


@pytest.mark.ranks(2)
def test_auto_resumes_with_its_choice():
    with nodes(1) as comm:
        auto = codec_for("auto")
        gradients = Gradients(auto, comm, dtype=torch.float32)
        for name, bound in (("none", 1e-6), ("bf16", 1e-2), ("int8", 2e-2)):
            state = {**auto.state_dict(), "name": name}
            assert auto.fits(state)
            auto.load_state_dict(state)
            error = distance(
                gradients.reduce([v.float() for v in drawn(comm.rank)]), of_all(comm, drawn)
            )
            assert bound / 100 < error + 1e-8 < bound
            assert auto.state_dict() == state
