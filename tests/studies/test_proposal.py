"""The report for a proposal has the numbers of the statistics, in three formats."""

import math
import re
import shlex
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import ConfigError
from hpctrain.report.document import Document, Listing, Section, Table, _Layout, write_documents
from hpctrain.report.drawing import canvases
from hpctrain.studies.points import attempts_of
from hpctrain.studies.proposal import Centre, Proposal
from hpctrain.studies.scaling_limit import ScalingLimit, per_doubling
from hpctrain.studies.study_file import CommandTable
from hpctrain.studies.study_results import summarize
from tests.studies import generated
from tests.studies.test_report import HOSTILE, hostile_results

ONE_CURVE = {"ranks": [1, 2, 4, 8]}


def results_of(cores=8, **changes):
    """Return a study with one curve."""
    asked = generated.config(ONE_CURVE, cores=cores)
    records = generated.records(asked, oversubscribed=False, **changes)
    return generated.complete(config=asked, records=records)


def timed(step_s, mode="strong", repeats=6):
    """Return the summaries of a curve with the given step times by ranks, without noise."""
    records = [
        generated.record({"ranks": ranks}, repeat, order, step_s=[each], seconds=each)
        for order, (ranks, each) in enumerate(step_s.items())
        for repeat in range(repeats)
    ]
    return summarize([replace(each, oversubscribed=False) for each in records], mode)


def table_of(document, section):
    """Return the rows of the table of a section as dicts from head to text."""
    [found] = [
        block
        for each in document.sections
        if each.title.startswith(section)
        for block in each.blocks
        if isinstance(block, Table)
    ]
    return [dict(zip(found.heads, row, strict=True)) for row in found.texts()]


def text_of(document):
    return document.markdown([f"{number}.png" for number in range(len(document.pages))])


def test_the_scaling_table_has_the_numbers_of_the_statistics():
    results = results_of()
    document = Proposal(results, Centre.named("generic"), num_samples=3.6e6).document()
    rows = table_of(document, "Strong scaling")
    for cell, summary in zip(rows, results.summaries, strict=True):
        assert cell["ranks"] == str(summary.ranks)
        assert cell["speed-up"].split()[0] == f"{summary.speed_up.value:.2f}"
        assert cell["efficiency"].split()[0] == f"{summary.efficiency.value:.0%}"
        hours = 3.6e6 / summary.samples_per_s.value / 3600
        assert cell["node-hours"] == f"{hours:.3g}"
        assert cell["core-hours"] == f"{hours * summary.ranks:.3g}"
    text = text_of(document)
    assert "Base of speed-up and efficiency: 1 rank on 1 node" in text
    assert "the whole training of 3,600,000 samples" in text


def test_predictions_and_their_validation_are_part_of_the_report():
    document = Proposal(results_of(), Centre.named("generic")).document()
    section = next(each for each in document.sections if each.title.startswith("Prediction"))
    text, validation, forecasts = section.blocks
    assert "the largest error of a predicted time is" in text
    assert [row[2] for row in validation.texts()] == ["4", "8"]
    assert [row[1] for row in forecasts.texts()] == ["16", "32"]
    assert forecasts.heads[-1] == "75% kept"
    few = generated.config({"ranks": [1, 2]}, cores=2)
    records = generated.records(few, oversubscribed=False)
    alone = Proposal(generated.complete(config=few, records=records), Centre.named("generic"))
    assert "needs 3 sizes with a core for each rank" in text_of(alone.document())


def test_without_a_length_costs_refer_to_the_target_or_to_a_million_samples():
    results = results_of()
    reached = Proposal(results, Centre.named("generic"))
    for summary in results.summaries:
        wanted = summary.median_of("time_to_target_s").value
        assert reached.training_s(summary) == pytest.approx(wanted)
    assert "the training to accuracy 0.95" in text_of(reached.document())
    missed = Proposal(results_of(time_to_target_s=None), Centre.named("generic"))
    for summary in missed.results.summaries:
        rate = summary.samples_per_s.value
        assert missed.training_s(summary) == pytest.approx(1e6 / rate)
    assert "Costs are for 1,000,000 samples" in text_of(missed.document())


@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_the_limit_is_the_last_size_before_the_first_that_misses(mode):
    efficiency = {1: 1.0, 2: 0.9, 4: 0.8, 8: 0.7, 16: 0.78}
    growth = {ranks: ranks if mode == "strong" else 1 for ranks in efficiency}
    points = timed({n: 1 / each / growth[n] for n, each in efficiency.items()}, mode)
    limit = ScalingLimit.of(points, "base", 0.75)
    assert limit.largest.ranks == 4
    assert "80% [80%, 80%]. The next size, 8 ranks on 1 node, has 70% [70%, 70%]" in limit.text
    by_doubling = ScalingLimit.of(points, "doubling", 0.75)
    assert by_doubling.largest.ranks == 16  # 0.7 / 0.8 is above 0.75
    assert ScalingLimit.of(points, "doubling", 0.88).largest.ranks == 4


def test_efficiency_per_doubling_takes_a_root_over_several_doublings():
    one, eight = timed({1: 8.0, 8: 2.0})
    assert per_doubling(one, eight).value == pytest.approx(0.5 ** (1 / 3))
    two, three = timed({2: 3.0, 3: 2.5})
    factor = math.log2(3 / 2)
    assert per_doubling(two, three).value == pytest.approx((3.0 / 2.5 / 1.5) ** (1 / factor))


def test_an_interval_across_the_requirement_is_undecided():
    noise = (0.85, 0.95, 1.0, 1.0, 1.05, 1.15)
    points = timed({1: 1.0, 2: 0.62, 4: 0.35})
    noisy = [
        replace(point, records=[replace(r, step_s=[r.step_s[0] * f]) for r, f in pairs])
        for point in points
        for pairs in [list(zip(point.records, noise, strict=True))]
    ]
    summaries = summarize([r for point in noisy for r in point.records], "strong")
    assert "also contains lower values" in ScalingLimit.of(summaries, "base", 0.7).text
    assert "also contains higher values" in ScalingLimit.of(summaries, "base", 0.75).text
    few = timed({1: 1.0, 2: 0.5}, repeats=2)
    assert "too few for a confidence of 95 %" in ScalingLimit.of(few, "base", 0.75).text
    assert "fewer than two sizes" in ScalingLimit.of(few[:1], "base", 0.75).text
    assert (
        "no measured size above 1 rank" in ScalingLimit.of(timed({1: 1, 2: 1}), "base", 0.75).text
    )


def test_centres_compare_sizes_with_the_base_or_with_the_next_smaller_one():
    csc = Proposal(results_of(), Centre.named("csc")).document()
    first, *others = [row["speed-up\nper doubling"] for row in table_of(csc, "Strong scaling")]
    assert first == "\N{EN DASH}"
    assert all(1 < float(text.split()[0]) <= 2 for text in others)
    assert "at least 1.5 times as fast when its ranks are doubled" in text_of(csc)
    other = Proposal(results_of(), Centre.named("eurohpc", 0.6)).document()
    assert "speed-up\nper doubling" not in table_of(other, "Strong scaling")[0]
    assert "must be at least 60%" in text_of(other)


def test_resources_are_shown_where_a_counter_was_read():
    bare = Proposal(results_of(), Centre.named("generic"), 1e6).document()
    assert "GPU utilisation, GPU memory of a rank" in text_of(bare)
    results = results_of(
        gpu="AMD MI250X",
        gpu_busy=0.83,
        gpu_memory_bytes=2**34,
        read_bytes=2.0**20,
        power_w=720.0,
        power_source="Cray pm_counters",
    )
    document = Proposal(results, Centre.named("generic"), 1e6).document()
    assert "GPU-hours" in table_of(document, "Strong scaling")[0]
    memory = table_of(document, "Memory")
    for cell, summary in zip(memory, results.summaries, strict=True):
        assert cell["GPU\nutilisation"] == "83%"
        assert cell["GPU memory\nof a rank"] == "16.0 GiB"
        seconds = 1e6 / summary.samples_per_s.value
        assert cell["energy,\nkWh"] == f"{720 * seconds / 3.6e6:.3g}"
        steps = seconds / summary.step_s.value
        assert float(cell["bytes\nread"].split()[0]) == pytest.approx(steps / 1024, rel=0.01)
    assert "Power is measured by Cray pm_counters" in text_of(document)


def test_strong_and_weak_scaling_in_one_study_have_a_table_each():
    factors = {"ranks": [1, 2], "batch": [64], "mode": ["strong", "weak"]}
    command = CommandTable(run="train --batch {global_batch}", launcher="mpirun -n {ranks}")
    asked = replace(generated.config(ONE_CURVE), factors=factors, command=command)
    attempts = attempts_of(asked)
    assert {each.repeat for each in attempts[:4]} == {0}  # each repeat measures both modes
    batches = {
        (each.point["mode"], each.layout.ranks): each.names("strong", "run")["global_batch"]
        for each in attempts
    }
    assert batches == {("strong", 1): 64, ("strong", 2): 64, ("weak", 1): 64, ("weak", 2): 128}
    points = [
        {"ranks": n, "batch": 64, "mode": mode} for mode in ("strong", "weak") for n in (1, 2)
    ]
    records = [generated.record(points[order % 4], order // 4, order) for order in range(20)]
    results = generated.complete(config=asked, records=records)
    assert results.caption.startswith("digits: strong and weak scaling of ")
    strong, weak = results.summaries[1], results.summaries[3]
    assert strong.efficiency.value == pytest.approx(weak.efficiency.value / 2, rel=0.2)
    sections = [
        section.title for section in Proposal(results, Centre.named("csc")).document().sections
    ]
    assert sections[2:4] == ["Strong scaling", "Weak scaling"]
    assert [results.curve(each.point) for each in results.summaries[::2]] == [
        "strong scaling",
        "weak scaling",
    ]


def test_points_next_to_other_work_are_flagged():
    records = results_of().records
    busy = replace(records[0], other_cores=3.1, num_throttled=2)
    results = replace(results_of(), records=[busy, *records[1:]])
    label = results.label(busy.point)
    text = text_of(Proposal(results, Centre.named("generic")).document())
    assert (
        f"Attention: {label}: other work disturbed 1 of 5 repeats and used up to 3.1 of 4 cores; "
        "the processor was throttled in 1 of 5 repeats.\n" in text
    )
    assert "Attention: some points were disturbed" in text
    slow = [replace(r, mhz=1500.0) if r.point == busy.point else r for r in records]
    [remark] = replace(results_of(), records=slow).remarks
    assert remark == (
        f"{label}: the processor ran at 1500 MHz, and at up to 2450 MHz at other points."
    )
    assert results_of().remarks == []


def test_the_job_script_runs_the_command_at_the_stated_size():
    results = results_of()
    text = text_of(Proposal(results, Centre.named("generic"), 3.6e9).document())
    script = re.search(r"```\n(#!/bin/bash\n.*?)```", text, re.DOTALL)[1]
    largest = Proposal(results, Centre.named("generic")).limits["Strong scaling"].largest
    assert f"#SBATCH --ntasks-per-node={largest.ranks}" in script
    hours, minutes, _ = map(int, re.search(r"--time=(\d+):(\d+):(\d+)", script).groups())
    expected_s = 3.6e9 / largest.samples_per_s.value
    assert expected_s < 60 * (60 * hours + minutes) < 1.2 * expected_s
    assert shlex.split(script.splitlines()[-1])[:3] == ["mpirun", "-n", str(largest.ranks)]


def latex_rows(text):
    """Return the cells of each row of each table in LaTeX."""
    tables = re.findall(r"\\hline\n(.*?)\n\\end\{tabular\}", text, re.DOTALL)
    lines = [[line for line in table.splitlines() if "hline" not in line] for table in tables]
    return [[re.split(r"(?<!\\)&", line.removesuffix("\\\\")) for line in each] for each in lines]


def test_wide_tables_fit_a_page_in_latex():
    document = Proposal(results_of(), Centre.named("eurohpc")).document()
    for rows in latex_rows(document.latex()):
        width = 0
        for column in zip(*rows, strict=True):
            plain = [
                re.sub(r"\\(begin|end)\{tabular\}(\[t\]\{.*?\}\})?", "", cell) for cell in column
            ]
            lines = [line.strip() for cell in plain for line in cell.split(r" \\ ")]
            width += max(len(line.replace("{[}", "[").replace("\\", "")) for line in lines) + 1
        assert width <= 88, rows
        # The first character of a line must not be read as the argument of the break before it.
        assert not any(re.search(r"\\\\\s*\[", cell) for row in rows for cell in row)


def test_hostile_names_are_escaped_in_all_formats(tmp_path):
    results = hostile_results()
    document = Proposal(results, Centre.named("eurohpc")).document()
    markdown, latex, pdf = write_documents(document, tmp_path, "proposal")
    text = markdown.read_text(encoding="utf-8")
    assert "\x1b" not in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    text = latex.read_text(encoding="utf-8")
    assert not re.search(r"(?<!\\)[$#_%]", text)
    for rows in latex_rows(text):
        assert len({len(row) for row in rows}) == 1
    assert pdf.read_bytes().startswith(b"%PDF")
    assert HOSTILE[:5].replace("[", "{[}") in text


def test_the_command_writes_a_page_for_each_figure(tmp_path):
    folder = generated.write(results_of(), tmp_path / "study")
    words = ["study", "report", str(folder), "--for", "eurohpc", "--samples", "1.2M"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    pdf = (folder / "proposal.pdf").read_bytes()
    num_figures = len(list((folder / "plots").glob("proposal-*.png")))
    assert num_figures == 5
    num_pages = len(re.findall(rb"/Type /Page\b", pdf))
    assert num_figures + 1 <= num_pages <= num_figures + 3
    markdown = (folder / "proposal.md").read_text()
    for image in re.findall(r"!\[.*?\]\((.*?)\)", markdown):
        assert (folder / image).exists()
    assert "TODO" not in markdown
    assert "\\begin{tabular}" in (folder / "proposal.tex").read_text()


def test_a_pdf_has_whole_cells_and_a_script_that_a_shell_accepts():
    cell = "undecided: no measured point has several nodes; measure 2 nodes"
    script = f"srun hpctrain train a.toml {' '.join(f'--set key{i}={i}' for i in range(20))}"
    blocks = [Table(title="t", heads=["a"], rows=[[cell]]), Listing(script)]
    sections = [Section(title="s", blocks=blocks)]
    with canvases() as new_canvas:
        pages = _Layout(new_canvas).pages_of(
            Document(title="d", sections=sections, pages=[], about="")
        )
    lines = [text.get_text() for page in pages for text in page.texts]
    assert cell in " ".join(lines)
    drawn = "\n".join(lines[lines.index(next(each for each in lines if "srun" in each)) :])
    assert drawn.count("\\\n") == drawn.count("\n") > 1
    assert shlex.split(drawn.replace("\\\n", " ")) == shlex.split(script)


def test_an_incomplete_study_states_the_planned_repeats():
    results = results_of()
    part = replace(results, records=[each for each in results.records if each.repeat != 1])
    rows = table_of(Proposal(part, Centre.named("generic")).document(), "Strong scaling")
    assert {row["repeats"] for row in rows} == {"4 of 5"}


def test_a_report_of_failures_only_states_what_is_missing(tmp_path):
    records = generated.records(status="failed", step_s=[], error="exit code 1")
    document = Proposal(generated.complete(records=records), Centre.named("csc")).document()
    assert "fewer than two sizes have an efficiency" in text_of(document)
    assert len(write_documents(document, tmp_path, "proposal")) == 3
    words = ["study", "report", str(generated.write(results_of(), tmp_path / "study"))]
    words += ["--for", "csc", "--samples", "many"]
    with pytest.raises(ConfigError, match="a number must be like"):
        CliRunner().invoke(app, words, catch_exceptions=False)
