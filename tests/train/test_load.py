"""Configurations from four sources; errors name the source, the key and a remedy."""

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.train.load_config import load


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "x.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_arguments_override_the_environment_which_overrides_the_file(file):
    path = file('[comm]\noverlap = "end"\nbucket_size = "1 MiB"\n[train]\nepochs = 3\n')
    environment = {"overlap": "inline", "bucket_bytes": 2048, "trace": True}
    loaded = load(path, ["comm.overlap=thread", "seed=5"], environment)
    config = loaded.config
    assert (config.comm.overlap, config.comm.bucket_bytes) == ("thread", 2048)
    assert (config.train.epochs, config.seed, config.train.global_batch) == (3, 5, 64)
    assert loaded.origin("comm.overlap") == "argument --set comm.overlap=thread"
    assert loaded.origin("comm.bucket_size") == "environment HPCTRAIN_BUCKET_BYTES"
    assert loaded.origin("train.epochs") == f"file {path}"
    assert loaded.origin("train.global_batch") == "default"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.name=Adam", "Adam"),
        ('optimizer.name="Adam"', "Adam"),
        (" optimizer.name = Adam ", "Adam"),
        ("optimizer.lr=1", 1.0),
        ("optimizer.lr=1e-3", 1e-3),
        ("log.plots=false", False),
        ("output_dir=/a=b", "/a=b"),
    ],
)
def test_an_argument_is_parsed_as_toml_or_else_as_text(override, value):
    table, _, key = override.partition("=")[0].strip().rpartition(".")
    config = load(None, [override]).config
    assert getattr(getattr(config, table) if table else config, key) == value


def test_a_free_table_accepts_any_key_and_keeps_other_keys(file):
    path = file("[model]\nargs = { width = 8, depth = 2 }\n")
    config = load(path, ["model.args.width=16", "model.args.inner.x=[1]"]).config
    assert config.model.args == {"width": 16, "depth": 2, "inner": {"x": [1]}}
    assert load(file("[model.args]\nwidth = 3\n")).config.model.args == {"width": 3}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", "did you mean train.epochs? [train] takes epochs, global_batch"),
        ("epochs=3", "did you mean train.epochs? the top of the file takes name, output_dir"),
        ("optimiser=1", "did you mean [optimizer]? the top of the file"),
        ("optimizer.weight_decay=0", "did you mean optimizer.args.weight_decay? [optimizer]"),
        ("nonsense=3", "nonsense is not a key; the top of the file takes name"),
        ("train=3", "train is a table"),
        ("train.epochs=x", "train.epochs must be an integer, got 'x' (text)"),
        ("train.epochs=2.0", "train.epochs must be an integer, got 2.0 (a number)"),
        ("train.epochs=true", "train.epochs must be an integer, got True (true or false)"),
        ("optimizer.lr=true", "optimizer.lr must be a number, got True (true or false)"),
        ("log.plots=1", "log.plots must be true or false, got 1 (an integer)"),
        ("optimizer.lr=0", "optimizer.lr must be above 0, got 0.0"),
        ("optimizer.lr=nan", "optimizer.lr must be above 0, got nan"),
        ("schedule.warmup_epochs=-1", "schedule.warmup_epochs must be at least 0, got -1.0"),
        ("train.epochs=0", "train.epochs must be at least 1, got 0"),
        ("train.clip_norm=-1", "train.clip_norm must be at least 0"),
        ("optimizer.args={lr=3}", "set optimizer.lr, and omit params"),
        (
            'optimizer.groups=[{match="*",lr="x"}]',
            "optimizer.groups: lr must be a number, got 'x'",
        ),
        ("train.micro_shards=3", "train.micro_shards must be a power of two, or 0, got 3"),
        ("train.check_replicas=0", "train.check_replicas must be at least 1, got 0"),
        ("train.check_replicas=x", "must be one of test, never or an integer, got 'x'"),
        ("comm.overlap=no", "comm.overlap must be one of auto, thread, inline, end, got 'no'"),
        ("comm.bucket_size=0B", "comm.bucket_size must be above 0, got '0B'"),
        ("comm.bucket_size=big", "comm.bucket_size: a size must be a number"),
        ('comm.bucket_size="25"', "got '25'; write \"25 B\" for bytes"),
        ("checkpoint.every=often", "checkpoint.every: a duration"),
        ("stop.after=1", "stop.after must be a time, got 1 (an integer)"),
        ("data.random=true", "set data.per_sample = true too"),
        ("name=a/b", "name must be a directory name"),
        ("name=", "name must be a directory name"),
        ("seed=-1", "seed must be at least 0"),
        ("train.ema=1", "train.ema must be below 1, got 1.0"),
        ("data.validation=1.5", "got 1.5; set it to a value at least 0 and below 1, or omit it"),
        ("train.ema=0.9 sync.method=diloco", "train.ema must be 0 with sync.method = diloco"),
        ("train.precision=fp16 train.reproducible=true", "set bf16, which needs no scale"),
        ("train.accumulate=2 train.reproducible=true", "got 2; set train.micro_shards"),
        (
            'optimizer.groups=["*"]',
            "optimizer.groups must be a list, each item a table, got ['*']",
        ),
        (
            "optimizer.groups=[{lr=1}]",
            'must have tables with match = "pattern" or a list of patterns',
        ),
        ("test.metric=[]", "and each name once, got []"),
        (
            "log.profile=[3]",
            "log.profile must be the first and the last step, counted from 1, got [3]",
        ),
        ("sync.method=own", "sync.method must be one of synchronous, local_sgd"),
        ("sync.steps=0", "sync.steps must be at least 1, got 0"),
        ("sync.steps=often", "sync.steps must be one of auto or an integer, got 'often'"),
        ("sync.args.state=average", "omit them, or choose another method"),
        ("sync.compression=int9", "sync.compression must be one of none, auto, fp16, bf16, int8"),
        ("train.master_dtype=fp32", "set train.shard = node too"),
        (
            "sync.compression=int8 train.shard=node",
            "because gradients are sent uncompressed, got 'int8'; omit one of them",
        ),
        ("sync.method=staged_sgd sync.steps=auto", "which changes the number by the loss"),
        ("sync.method=diloco sync.args.steps=3", "must not have steps, compression"),
        ("sync.method=diloco train.reproducible=true", "got 'diloco'; omit one of them"),
        ("sync.method=diloco data.on_corrupt=skip", "or use synchronous training"),
        (
            "train.reproducible=true train.micro_shards=128",
            "at least the number of micro-shards, 128",
        ),
        ("train.reproducible=true data.on_corrupt=skip", "must be raise with train.reproducible"),
        ("data.random=true data.per_sample=true", "set data.test_transform to a function without"),
        ("train.epochs", "--set must be key=value, such as train.epochs=5, got 'train.epochs'"),
        ("=3", "--set must be key=value"),
    ],
)
def test_an_invalid_argument_is_reported_with_a_remedy(override, message):
    overrides = override.split()
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    assert message in str(caught.value)
    assert len(overrides) > 1 or override in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nepoch = 3\n", "train.epoch is not a key; did you mean train.epochs?"),
        ("[trian]\nepochs = 3\n", "trian is not a key; "),
        ("train = 3\n", "train is a table"),
        ("[train]\nepochs = '3'\n", "train.epochs must be an integer, got '3' (text)"),
        ("[train]\nepochs = -1\n", "train.epochs must be at least 1, got -1"),
        ("[train\n", "cannot be read as TOML"),
        ("[comm]\nbucket_size = 'huge'\n", "comm.bucket_size: a size must be a number and a unit"),
    ],
)
def test_an_error_in_a_file_has_the_file_and_the_key(file, text, message):
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_run_directory_has_the_name_of_the_run_by_default():
    assert str(load(None, ["name=a"]).config.directory) == "runs/a"
    assert str(load(None, ["name=a", "output_dir=/b/c"]).config.directory) == "/b/c"


def test_explain_gives_type_and_default_or_suggests_a_key():
    rows = dict(load(None, ["optimizer.lr=0.1"]).explain("optimizer.lr"))
    assert (rows["type"], rows["default"], rows["value"]) == ("a number", "0.05", "0.1")
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.lr\?"):
        load(None).explain("optimiser.lr")


def test_a_script_instead_of_a_configuration_is_refused_with_the_commands_that_start_it(tmp_path):
    refused = r"must be a TOML file, got .*train\.py; .*`hpctrain submit -- python .*train\.py`"
    with pytest.raises(ConfigError, match=refused):
        load(tmp_path / "train.py")


def test_missing_files_folders_and_binary_files_are_rejected(tmp_path):
    with pytest.raises(
        ConfigError, match=r"there is no file .*none.toml; create it with hpctrain train .* --init"
    ):
        load(tmp_path / "none.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "b.toml"):
        with pytest.raises(ConfigError, match="cannot be read as TOML"):
            load(path)
