"""Make sources of every kind, as the bytes of their files."""

import struct
import tarfile
import zlib
from io import BytesIO

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def npy(array):
    out = BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(*, save=np.savez, **arrays):
    out = BytesIO()
    save(out, **arrays)
    return out.getvalue()


def hdf5(**datasets):
    """Make a file of datasets by name: values, or functions of the file and the name."""
    out = BytesIO()
    with h5py.File(out, "w") as file:
        for name, values in datasets.items():
            if callable(values):
                values(file, name)
            else:
                file[name] = values
    return out.getvalue()


def parquet(**columns):
    out = BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def arrow(*, is_stream=True, **columns):
    out, table = BytesIO(), pa.table(columns)
    make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with make(out, table.schema) as writer:
        writer.write_table(table, 4)
    return out.getvalue()


def picture(seed, height=4, width=4):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def image(made, kind="png"):
    out = BytesIO()
    made.save(out, kind)
    return out.getvalue()


def png(seed, height=4, width=4):
    return image(picture(seed, height, width))


def claiming(side):
    """Return a PNG of a few bytes that claims to have ``side`` by ``side`` pixels."""
    data = bytearray(image(Image.new("1", (8, 8))))
    data[16:24] = struct.pack(">II", side, side)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def tar(*members, mode="w"):
    """Make an archive of names with contents, or with tar information of members."""
    out = BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, dict):
                for key, value in content.items():
                    setattr(member, key, value)
                archive.addfile(member)
                continue
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    return out.getvalue()


def samples_tar(samples, mode="w"):
    """Make an archive of samples: key -> extension -> content."""
    members = [
        (f"./folder/{key}.{ending}", content)
        for key, files in samples.items()
        for ending, content in files.items()
    ]
    return tar(*members, mode=mode)


def sparse(claimed):
    """Return an archive of a few KB with a sparse file that claims to be large."""
    info = tarfile.TarInfo("a.bin")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:512] = bytes(126)
    header[386:410] = b"%011o\0%011o\0" % (claimed, 0)
    header[483:495] = b"%011o\0" % claimed
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    return bytes(header) + bytes(10240 - 512)


def write(root, files):
    """Write contents to the paths of their files."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
