"""Check sources that cannot be packed exactly: an error with the reason, and no data set."""

import tarfile

import h5py
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import MANIFEST
from hpctrain.data.packing.pack import PackConfig, pack
from tests.data.packing.makers import (
    claiming,
    hdf5,
    image,
    npy,
    npz,
    parquet,
    png,
    samples_tar,
    sparse,
    tar,
    write,
)

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")

X = np.random.default_rng(0).random((30, 4, 3), dtype=np.float32)
Y = np.arange(30) % 7


def half(content):
    return content[: len(content) // 2]


def zeros_inside(content):
    return content[:200] + bytes(50) + content[250:]


def texts_of_two_dimensions(file, name):
    file.create_dataset(name, (5, 2), h5py.string_dtype())


ARRAYS = [
    ({"a.npz": npz(x=X, y=Y[:7])}, {}, "same number of samples"),
    ({"a.npz": npz(x=X, y=3)}, {}, "the first dimension of an array must count samples"),
    ({"a.npz": npz(x=np.array(["a", "b"]))}, {}, "convert it first"),
    ({"a.npz": npz(x=np.array([None, 1]))}, {}, "cannot be read as an array of numbers"),
    ({"a.npz": npz()}, {}, "no array"),
    ({"a.npz": npz(x=X[:0])}, {}, "at least one sample"),
    ({"a.npz": npz(x=X)}, {"fields": {"label": "z"}}, "got 'z'"),
    ({"1.npz": npz(x=X), "2.npz": npz(x=Y)}, {}, "same fields"),
    (
        {"a.npz": zeros_inside(npz(save=np.savez_compressed, x=X))},
        {},
        r"x of .*a.npz cannot be read",
    ),
    ({"a.npz": b"nothing"}, {}, r"a.npz cannot be read"),
    ({"a.npy": npy(Y)}, {"fields": {"a": "y.npy"}}, "No such file"),
]

HDF5 = [
    ({"a.h5": hdf5(x=X, short=Y[:3])}, {}, r"same number of samples.*'short': 3"),
    ({"a.h5": hdf5(x=X)}, {"fields": {"y": "/labels"}}, "got 'labels'"),
    ({"a.h5": hdf5(x=3)}, {}, "the first dimension of an array must count samples"),
    ({"a.h5": hdf5(z=np.zeros(5, complex))}, {}, "convert it first"),
    (
        {"a.h5": hdf5(t=texts_of_two_dimensions)},
        {},
        r"one dimension, .*:/t has the shape \(5, 2\)",
    ),
    ({"a.h5": hdf5(x=X)[:100]}, {}, r"a.h5 cannot be read as an HDF5 file"),
]

QUOTE = r"the row in line {} of .*t.csv failed: .*close the quote"
LOSSY = f"a,f,t\n300,0.5,x\n{2**53 + 1},1e5,y\n"
LONG = "x" * 3 * 2**20
CSV = [
    ({"t.csv": "a,b\n1,2\n"}, {"fields": {"x": "a,c"}}, r"array of .*t\.csv.* \(a, b\) .*got 'c'"),
    ({"t.csv": "a,b\n"}, {}, "has no rows"),
    ({"t.csv": "a,a\n1,2\n"}, {"fields": {"x": "a"}}, "has 2 columns named a"),
    ({"t.csv": "a,t\n1,x\n"}, {"fields": {"x": "a,t"}}, "one number per row, but column t"),
    ({"t.csv": "a,b\n1,2\nNA,3\n"}, {}, "column a of .*t.csv has 'NA', which i8 cannot represent"),
    (
        {"0.tsv": "a\n1\n", "1.tsv": "a\nx\n"},
        {},
        r"1.tsv has 'x', which i8 cannot",
    ),
    ({"0.csv": "a\ntrue\n", "1.csv": "a\n1\n"}, {}, r"1.csv has '1', which b1 cannot"),
    (
        {"0.csv": "a\n0.5\n", "1.csv": f"a\n0.5\n{2**53 + 1}\n"},
        {},
        rf"1.csv has '{2**53 + 1}', which f8 cannot",
    ),
    ({"t.csv": 'a,b\n1,"x\n2,y\n'}, {}, QUOTE.format(2)),
    ({"t.csv": 'a,b\n1,"x"\n2,"y""\n'}, {}, QUOTE.format(3)),
    ({"t.csv": 'a,b\r\n1,"x\r\ny"\r\n2,z"z\r\n3,"z\r\n4,z'}, {}, QUOTE.format(5)),
    ({"t.csv": 'a,"b\n1,2\n'}, {}, QUOTE.format(1)),
    (
        {"t.csv": f'a,b\n1,z\n2,"{LONG}"\n'},
        {},
        r"at most 1.0 MiB, but reading the row in line 3 of .*t.csv",
    ),
    ({"t.csv": f'a,b\n1,z\n2,"{LONG}\n'}, {}, r"the row in line 3 of .*t.csv failed"),
    *(
        ({"t.csv": f"a,b\n1,2\n{row}\n3,4\n"}, {}, r"in line 3 of .*t.csv has . values; repair it")
        for row in ("1,2,", ",,,,", "1")
    ),
    (
        {"t.csv": LOSSY},
        {"fields": {"x": "a:i1"}},
        "column a .* has '300', which i1 cannot represent",
    ),
    ({"t.csv": LOSSY}, {"fields": {"x": "f:i4"}}, "has '0.5', which i4 cannot represent"),
    ({"t.csv": LOSSY}, {"fields": {"x": "f:f2"}}, "f2 cannot represent 100000.0 in"),
    ({"t.csv": LOSSY}, {"fields": {"x": "t:f4"}}, "has 'x', which f4 cannot represent"),
    ({"t.csv": LOSSY}, {"fields": {"x": "a,f"}}, "rounds integers in column a"),
    ({"t.csv": LOSSY}, {"fields": {"x": "a:f16"}}, "got 'a:f16'"),
]

PARQUET = [
    (
        {"t.parquet": parquet(a=[1])},
        {"fields": {"x": "a:text"}},
        "must be a number type such as f4",
    ),
    ({"t.parquet": b"nothing"}, {}, "cannot be read as a table"),
    ({"t.arrow": b"nothing"}, {}, "cannot be read as a table"),
    ({"t.arrow": b""}, {}, "cannot be read as a table"),
    ({"t.parquet": parquet(odd=[1, None])}, {}, "column odd .*has 1 among 2 rows"),
    ({"t.parquet": parquet(odd=pa.array([1], pa.timestamp("s")))}, {}, "column odd .*timestamp"),
    ({"t.parquet": parquet(odd=[[1], [None]])}, {}, "column odd .*with missing values"),
    (
        {"0.parquet": parquet(a=[1]), "1.parquet": parquet(b=[1])},
        {},
        r"array of .*1.parquet \(b\) .*got 'a'",
    ),
]

NUMBERS = {f"{index:04}": {"txt": b"%d" % index} for index in range(99)}
BIG = b"%d" % (2**64 - 1)
NOTE = {"type": tarfile.GNUTYPE_LONGNAME, "size": 2**26}
WHOLE = samples_tar({f"{index:04}": {"bin": bytes(500)} for index in range(99)})
ENDED = tar(("a.cls", b"1"), ("b.cls", b"2"))
TAR = [
    ({"0.tar": tar()}, {}, "has none"),
    (
        {"0.tar": tar(("a.cls", b"1"))},
        {"fields": {"x": "cls:f3"}},
        "must be NAME=ENDING, NAME=ENDING:bytes or a type",
    ),
    (
        {"0.tar": samples_tar({"a": {"txt": b"1", "cls": b"1"}, "odd": {"txt": b"1"}})},
        {},
        r"0.tar:.*folder/odd lacks cls",
    ),
    (
        {"0.tar": samples_tar({"a": {"cls": b"1"}, "odd": {"cls": b"dog"}})},
        {},
        r"odd.cls cannot be read as a number.*:bytes after its ending",
    ),
    *(
        (
            {"0.tar": samples_tar(NUMBERS | {at: {"txt": b"1", "cls": b"3"}})},
            {},
            f"{at} also has cls",
        )
        for at in ("0001", "0090")
    ),
    # Inside a content, inside a header, after a header, and between two samples.
    *(
        ({"0.tar": WHOLE[:size]}, {}, r"0.tar cannot be read as an archive")
        for size in (40_000, 40_960 + 100, 512, 1024 * 70, len(WHOLE) - 10_240)
    ),
    *(
        (
            {"0.tar": ENDED + bytes(between) + ENDED},
            {},
            rf"zeros at byte {len(ENDED) + between}.*-zeros -xf",
        )
        for between in (0, 512, 10_240)
    ),
    (
        {"0.tar": ENDED[:1024] + bytes(512) + ENDED[1024:]},
        {},
        r"other data follow the zeros at byte 1536",
    ),
    (
        {"0.tar": tar(("same.cls", b"1"), ("same.cls", b"2"))},
        {},
        r"0.tar:/same has two .cls; give each sample its own name",
    ),
    (
        {"0.tar": tar(("a.cls", b"1"), ("a.txt", b"1"), ("b.txt", b"1"), ("a.txt", b"1"))},
        {"fields": {"x": "txt"}},
        r"a .txt of .*0.tar:/a follows other samples; rewrite",
    ),
    (
        {"0.tar": tar(("a.id", b"1"), ("b.id", BIG))},
        {},
        r"field id of .*0.tar has signed .* of 64 bits, .*pack bytes",
    ),
    ({"0.tar": sparse(6 * 10**9)}, {}, r"at most 1.0 GiB together, .*a claims 5.6 GiB"),
    *(
        (
            {"0.tar": tar(("0.txt", b"5"), ("2.txt", {"type": kind, "linkname": "0.txt"}))},
            {},
            r"2.txt of .*0.tar is a link to 0.txt; .*--hard-deref",
        )
        for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE)
    ),
    (
        {"0.tar": tar(("a.png", claiming(13_000)))},
        {},
        r"at most 89478485 pixels, .*a.png has more .*13000x13000",
    ),
]

TWO = {"cat/a.png": png(0), "dog/b.png": png(1)}
FOLDERS = [
    (TWO | {"stray.png": png(2)}, {}, r"stray.png is next to"),
    (TWO | {"dog/a.npy": npy([1])}, {}, "2 images and 1 arrays"),
    (TWO | {"dog/b.png": half(png(1))}, {}, r"b.png cannot be read as an image"),
    (
        TWO | {"cow/notes.txt": ""},
        {},
        r"must have images, but there is none below .*/cow; restore",
    ),
    ({"a/1.npy": npy(X)}, {"resize": (2, 2)}, "with images"),
    (
        {f"{i:03}.png": png(i, 4, 2 if i == 1 else 4) for i in range(200)},
        {},
        r"001.png has \(4, 2, 3\).*--resize HxW or --encoded",
    ),
    *(
        (
            {"a.tif": image(Image.fromarray(np.full((4, 4), 1000, dtype)), "tiff")},
            {},
            r"must have 8 bits, but .*a.tif has more.*--encoded",
        )
        for dtype in (np.uint16, np.int32, np.float32)
    ),
    *(
        ({"a.png": claiming(side)}, {}, r"at most 89478485 pixels, .*a.png has more.*--encoded")
        for side in (13_000, 20_000)
    ),
    ({"1.tar": tar(), "1.csv": "", "2.csv": ""}, {}, "2 files of kind csv, 1 file of kind tar"),
    ({"1.md": ""}, {}, "no such file"),
    ({"1.md": ""}, {"kind": "arrays"}, r"files that end in .npy, .npz, .*folder has none"),
]

TOKENS = """
def words(text): return [len(word) for word in text.split()]
def wrong(text): return [0.5]
def none(text): return None
"""
TEXT = {"1.txt": "some words\n", "refused_tokens.py": TOKENS}
TEXTS = [
    (TEXT, {"length": 999}, "the 999 bytes of a sample"),
    (TEXT, {"tokenizer": "refused_tokens:wrong"}, "a list of integers"),
    (TEXT, {"tokenizer": "refused_tokens:none"}, "none returned object"),
    (TEXT, {"tokenizer": "refused_tokens:nothing"}, "has no nothing"),
    (TEXT, {"tokenizer": "nowhere:f"}, "there is no module nowhere"),
    (TEXT, {"fields": {"x": "words"}}, "got 'words'"),
    (TEXT | {"1.txt": b"\xff\xfe"}, {"tokenizer": "refused_tokens:words"}, r"UTF-8, .*1.txt is"),
]

OPTIONS = [
    ({"a.npy": npy(Y)}, config, words)
    for config, words in [
        ({"kind": "zip"}, "one of arrays, hdf5"),
        ({"resize": (2, 2)}, "--resize must be used with tar, folder, but this source is arrays"),
        ({"tokenizer": "a:b"}, "--tokenizer must be used with text"),
        ({"kind": "folder"}, "must be used with a folder"),
        ({"split": "a/b"}, "a split must be a word"),
        ({"fields": {"a b": "a.npy"}}, "name of a Python variable"),
        ({"compression": "gzip"}, "zstd"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"length": -1}, "length must be at least 1"),
        ({"resize": (0, 3)}, "--resize 0x3"),
        ({"resize": (3, 3), "encoded": True}, "and --encoded"),
    ]
]

FILES = [*ARRAYS, *HDF5, *CSV, *PARQUET, *TAR, *FOLDERS, *TEXTS, *OPTIONS]


@pytest.mark.parametrize(
    ("files", "config", "words"), [pytest.param(*case, id=case[-1]) for case in FILES]
)
def test_unsupported_files_are_rejected(tmp_path, monkeypatch, files, config, words):
    write(tmp_path / "folder", files)
    monkeypatch.chdir(tmp_path / "folder")
    # One file is packed by itself, several as a pattern or a folder of one kind.
    names = [name for name in files if not name.endswith(".py")]
    endings = {name.rpartition(".")[2] for name in names}
    is_folder = len(endings) > 1 or endings & {"png", "tif", "md"} or "/" in names[0]
    source = tmp_path / "folder"
    if not is_folder:
        source = source / (names[0] if len(names) == 1 else f"*.{endings.pop()}")
    with pytest.raises(DataError, match=words):
        pack(source, tmp_path / "set", PackConfig(**config))
    assert not (tmp_path / "set" / MANIFEST).exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([], "at least one sample"),
        ([3], "a sample must be a dict"),
        ([{"x": 1}, {"y": 1}], "item 1 of list lacks x and also has y"),
        ([{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}], r"have the shape \(length, \*\(3,\)"),
        ([{"x": 1}, {"x": [1]}], "must have a first dimension, but"),
        ([{"x": object()}], "convert it first"),
        ([{"x": [[1, 2], [3]]}], "x of item 0 of list, but raised: .*convert it first"),
        ({"x": [1, 2, 3]}, "dict gives one dict; yield a dict for each sample"),
        (lambda: {"x": [1, 2, 3]}, "gives one dict"),
        (lambda: None, "gives one NoneType"),
        (iter([{"x": 1}]), "pass the function that creates it"),
        ([{"x": [0]}] * 70 + [{"x": [0, 0]}], r"item 70 of list has \(2,\).*--ragged x"),
        ("nowhere:rows", "there is no module nowhere"),
        ("tests.data.packing.makers:nothing", "has no nothing"),
        ("nothing", "there is no nothing"),
        ("*.bin", r"there is no \*.bin"),
        (__file__, "must end in one of .*set its kind"),
    ],
)
def test_other_unsupported_sources_are_rejected(tmp_path, source, words):
    with pytest.raises(DataError, match=words):
        pack(source, tmp_path / "set")
    assert not (tmp_path / "set" / MANIFEST).exists()


def test_a_name_of_a_function_has_a_form(tmp_path):
    with pytest.raises(DataError, match='must be "module:function", got "my rows"'):
        pack("my rows", tmp_path / "set", PackConfig(kind="python"))


def test_notes_of_a_file_that_claim_to_be_large_are_limited(tmp_path):
    note = tar(("././@LongLink", NOTE))[:512] + bytes(2**26) + bytes(10_240)
    write(tmp_path, {"0.tar": note})
    with pytest.raises(DataError, match=r"an extended header has 64.0 MiB"):
        pack(tmp_path / "0.tar", tmp_path / "set")
