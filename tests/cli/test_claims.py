"""Compare figures, defaults and limits in guides and README with the code."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import hpctrain
from hpctrain.async_sgd import sharded_embedding
from hpctrain.comm import request_thread, waiting
from hpctrain.comm.process_group.reductions import LARGE_BYTES
from hpctrain.core.config import Settings
from hpctrain.core.keys import keys_of
from hpctrain.core.units import GIB, KIB, MIB
from hpctrain.cost import Model as StepModel
from hpctrain.data import steps
from hpctrain.data.order import window
from hpctrain.data.packing import pack
from hpctrain.horovod.elastic.run import MAX_FAILURES
from hpctrain.launch import lease, restart, supervise
from hpctrain.negotiation import engine_driver
from hpctrain.train.run_config import RunConfig
from tests.cli.test_guide import TEXTS as GUIDES
from tests.cli.test_guide import WRITTEN

ROOT = Path(__file__).parents[2]
TEXTS = {**{name: GUIDES[name] for name in WRITTEN}, "README": (ROOT / "README.md").read_text()}


def prose(name):
    """Return the text of a page in one line, without blocks of code and output."""
    text = re.sub(r"^```.*?^```", "", TEXTS[name], flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return " ".join(text.split())


def default(function, name):
    return inspect.signature(function).parameters[name].default


SETTINGS, BUCKET = Settings(), StepModel.__dataclass_fields__["bucket_bytes"].default
(MAX_REQUEUES,) = re.findall(
    r"-lt \"\$\{MAX_REQUEUES:-(\d+)\}", (ROOT / "slurm/requeue.sbatch").read_text()
)
BURST_US, LONGEST_MS = engine_driver._BURST_S * 1e6, engine_driver._LONGEST_S * 1e3
KB, WINDOW = steps.FAST_ALONE_BYTES // 1000, f"{window.MIXED:,}"
FIGURES = [
    ("hangs", f"| {SETTINGS.stall_s:g} s (`HPCTRAIN_STALL_S`) |"),
    ("hangs", f"| {SETTINGS.timeout:g} s (`HPCTRAIN_TIMEOUT`) |"),
    ("hangs", f"| {supervise.FEW_S:g} s | under `hpctrain launch`: a rank ended"),
    ("recover", f"within {restart.ANSWER_S:g} seconds"),
    ("recover", f"After {['no', 'one', 'two', 'three'][MAX_FAILURES]} unsuccessful retries"),
    ("data", f"A window mixes {window.MIXED_PER_SAMPLE} blocks per sample"),
    ("data", f"global batch, and at least {WINDOW}. A block has at least"),
    ("data", f"A block has at least {window.BLOCK_BYTES // KIB} KiB"),
    ("data", f"`global` for samples of {KB} kB and more"),
    ("data", f"for sets up to {steps.CACHED_BYTES // GIB} GiB, else `window`"),
    ("data", f"read into memory for this, up to {pack.SHUFFLED_BYTES // GIB} GiB"),
    ("slurm", f"otherwise after {lease.TIMES.stale_s:g} seconds without a heartbeat"),
    ("slurm", f"still active after {lease.TIMES.wait_s:g} seconds, the second ends"),
    ("torch-distributed", f"DDP buckets of {LARGE_BYTES // MIB} MiB and more"),
    ("data", f"samples of {KB} kB and more"),
    ("data", f"| {KB} kB and more |"),
    ("slurm", f"at most `MAX_REQUEUES` times ({MAX_REQUEUES})"),
    ("architecture", f"by a timer after {BURST_US:g} µs ({LONGEST_MS:g} ms in a loop"),
    ("async-sgd", f"after at most {waiting.SLEEP_SHARE * 100:g} % of the time since the last"),
    ("async-sgd", f"and {request_thread._LONGEST_S:g} s at most"),
    ("embeddings", f"warns after {sharded_embedding._MANY_LOOKUPS} lookups"),
    ("horovod-variables", f"default {SETTINGS.stall_s:g}, in Horovod 60"),
    ("plan", f"in buckets of {BUCKET // MIB} MiB"),
]
"""Figures of the code, in the notation of the pages."""


@pytest.mark.parametrize(("topic", "text"), FIGURES)
def test_figures_in_guides_are_those_of_the_code(topic, text):
    assert text in " ".join(TEXTS[topic].split())


@pytest.mark.parametrize("topic", ["local-sgd", "async-sgd"])
def test_arguments_in_the_tables_of_methods_are_the_defaults(topic):
    table = TEXTS[topic].partition("## Choose a method")[2].partition("## ")[0]
    calls = re.findall(r"^\| `((\w+)\(.*?\))` \|", table, re.MULTILINE)
    assert calls
    for text, name in calls:
        for each in ast.parse(text).body[0].value.keywords:
            value = ast.literal_eval(each.value)
            usual = default(getattr(hpctrain, name), each.arg)
            assert value in (usual, EXAMPLES.get(each.arg)), text


EXAMPLES = {"warmup_steps": 100, "cooldown_start": 900}  # required arguments


# Claims that no list has to name

QUANTITY = re.compile(
    r"(?<![\w.,-])\d[\d,.]* (?:s|ms|µs|seconds|minutes|kB|KiB|MiB|GiB|names|lookups|blocks)\b"
)
LIMIT = re.compile(
    r"\b(defaults?|at most|at least|up to|within|after|and more|limit|until|once per|first)\b"
)
NOT_OF_THE_CODE = [
    ("data", "Use shards of 256 MiB to 2 GiB."),
    ("performance", "0.15 s in place of 0.05 s at the first start of four ranks |"),
    ("torch-distributed", "rank 0 on node1 has waited 60 s for the other ranks"),
]
"""Recommendations, measurements and output that read like limits."""


def limits(name):
    """Yield the sentences and cells of a page that state a quantity as a default or a limit."""
    for text in re.split(r"(?<=[.:;|])\s+", prose(name)):
        if QUANTITY.search(text) and LIMIT.search(text):
            yield text


@pytest.mark.parametrize("name", TEXTS)
def test_every_limit_of_a_page_is_compared_with_the_code(name):
    known = [text for topic, text in [*FIGURES, *NOT_OF_THE_CODE] if topic == name]
    for text in limits(name):
        assert any(each in text or text in each for each in known), text


def defaults_of_code():
    """Return every default by name: keys, settings, and arguments of public functions."""
    found = {name: [key.default] for name, key in keys_of(RunConfig).items()}
    for name in inspect.get_annotations(Settings):
        found[f"HPCTRAIN_{name.upper()}"] = [getattr(SETTINGS, name)]
    for name in hpctrain.__all__:
        value = getattr(hpctrain, name)
        if callable(value):
            for argument in _parameters(value):
                if isinstance(argument.default, str | int | float):
                    found.setdefault(argument.name, []).append(argument.default)
    return found


def _parameters(function):
    try:
        return inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()


STATED = re.compile(r"`([\w.]+) ?= ?([^`]+)` \((?:the )?default\)")


def test_defaults_in_pages_are_those_of_the_code():
    of_code, num = defaults_of_code(), 0
    for page in TEXTS:
        for name, text in STATED.findall(prose(page)):
            assert text.strip('"') in map(str, of_code[name]), f"{page}: {name} = {text}"
            num += 1
    assert num >= 3


def test_seconds_of_settings_in_pages_are_the_defaults():
    num = 0
    for page in TEXTS:
        for seconds, name in re.findall(r"([\d.]+) s \(`HPCTRAIN_(\w+)`\)", prose(page)):
            assert float(seconds) == getattr(SETTINGS, name.lower()), f"{page}: {name}"
            num += 1
    assert num >= 2
