"use strict";

const { colours, figures } = JSON.parse(document.getElementById("figures").textContent);

// Ticks of logarithmic axes: 1, 2 and 5 in each decade.
const DIGITS = Array.from({ length: 60 }, (_, n) => [1, 2, 5][n % 3] * 10 ** (Math.floor(n / 3) - 9));

const UNNAMED = ["faint", "marks"]; // kinds that a legend leaves out

// Escape the characters by which Plotly would recognize tags and formulas in names.
const plain = (text) =>
  typeof text === "string" ? text.replace(/[&<>$]/g, (c) => `&#${c.charCodeAt(0)};`) : text;

function trace(series, place, all) {
  const color = colours[series.colour % colours.length];
  const name = plain(series.name);
  const common = { x: series.x.map(plain), y: series.y, name, legendgroup: name };
  const first = all.findIndex((other) => !UNNAMED.includes(other.kind) && other.name === series.name);
  common.showlegend = name !== "" && first === place;
  const width = series.width;
  const line = { ...common, mode: "lines" };
  const points = { ...common, mode: "markers" };
  if (series.above) {
    points.error_y = { array: series.above, arrayminus: series.below, color, thickness: 1.5 };
  }
  return {
    bars: { ...common, type: "bar", marker: { color } },
    area: { ...line, stackgroup: "parts", line: { color, width: 0 }, fillcolor: color },
    faint: { ...line, line: { color, width: 1 }, opacity: 0.4, hoverinfo: "skip", showlegend: false },
    linked: { ...common, mode: "lines+markers", line: { color, width }, marker: { color, size: 4 * width } },
    solid: { ...line, line: { color, width }, opacity: 1 },
    dashed: { ...line, line: { color, dash: "dash", width: 1.5 } },
    dotted: { ...line, line: { color, dash: "dot", width: 1.5 } },
    hollow: { ...points, marker: { color, size: 9, symbol: "circle-open" } },
    points: { ...points, marker: { color, size: 9 } },
    repeats: { ...points, opacity: 0.4, marker: { color, size: 4 } },
  }[series.kind];
}

// Lines across a figure; one of them has its name in the legend.
function marks(series) {
  const line = { color: colours[series.colour % colours.length], dash: "dot", width: 1.5 };
  return series.x.map((x, place) => ({
    type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line,
    name: plain(series.name), showlegend: place === 0,
  }));
}

// Draw all figures in the colours of the page; called again when the page turns light or dark.
function draw() {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, page] = ["--ink", "--line", "--page"].map((n) => style.getPropertyValue(n));
  const lines = { automargin: true, gridcolor: line, linecolor: line, zerolinecolor: line };
  for (const figure of figures) {
    const xaxis = { ...lines, title: { text: plain(figure.x_label) } };
    if (figure.x_label === "ranks") {
      const sizes = [...new Set(figure.series.flatMap((series) => series.x))];
      Object.assign(xaxis, { type: "log", tickvals: sizes, ticktext: sizes.map(String) });
    } else if (!figure.x_label) {
      xaxis.type = "category";
    }
    const yaxis = { ...lines, title: { text: plain(figure.y_label), standoff: 8 } };
    if (figure.scale === "log") {
      Object.assign(yaxis, { type: "log", tickformat: "~g", tickvals: DIGITS });
    } else if (figure.scale === "linear") {
      yaxis.rangemode = "tozero";
    }
    if (figure.top !== null) yaxis.range = [0, figure.top];
    const layout = {
      barmode: figure.is_stacked ? "stack" : "group",
      font: { color: ink, family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: page, bordercolor: line, font: { color: ink } },
      legend: { font: { size: 11 }, orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      margin: { l: 10, r: 10, t: 10, b: 10 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      shapes: figure.series.filter((series) => series.kind === "marks").flatMap(marks),
      xaxis,
      yaxis,
    };
    const drawn = figure.series.filter((series) => series.x.length && series.kind !== "marks");
    const traces = drawn.map(trace);
    Plotly.react(figure.name, traces, layout, { displayModeBar: false, responsive: true });
  }
}

function sort(button) {
  const head = button.closest("th");
  const body = head.closest("table").tBodies[0];
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  const key = ({ cells }) => cells[head.cellIndex].dataset.v ?? cells[head.cellIndex].textContent;
  const compare = (a, b) => a - b || String(a).localeCompare(String(b), undefined, { numeric: true });
  const sign = order === "ascending" ? 1 : -1;
  body.append(...[...body.rows].sort((a, b) => sign * compare(key(a), key(b))));
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sort(button));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
