// Charts: data as `charts.py` gives it, drawn by plotly.js. A chart is drawn when it comes near the screen, or before printing.
"use strict";

{
  const { light, dark, markers } = report.page;
  const charts = report.data("charts");
  const hidden = new Set(report.recall("hidden") || []);
  const drawn = new Set();
  const font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif";
  const theme = (isDark) => isDark
    ? { text: "#e7e9ec", soft: "#a0a8b3", grid: "#272c33", line: "#4a525c", paper: "#14171b", card: "#1a1e23", palette: dark, band: 0.22 }
    : { text: "#1c2024", soft: "#5c6570", grid: "#ecedea", line: "#b9bdb8", paper: "#fcfcfa", card: "#ffffff", palette: light, band: 0.14 };

  const hundred = [0, 20, 40, 60, 80, 100];

  // Plotly reads some HTML in labels, and run names may hold anything.
  const plain = (text) => report.visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const faint = (colour, alpha) => `rgba(${[1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)).join(",")},${alpha})`;

  const colourOf = (one, colours) => (one.style < 0 ? colours.text : colours.palette[one.style % colours.palette.length]);
  const shown = (chart, one) => chart.by === "own" || !hidden.has(`${chart.by}-${one.style}`);

  // A long name of a row in two lines, where there is little room.
  function wrapped(text, width) {
    const lines = [""];
    for (const word of report.visible(text).split(" ")) {
      const last = lines.length - 1;
      if (last === 0 && lines[0] && (lines[0] + word).length > width) lines.push(word);
      else lines[last] += (lines[last] ? " " : "") + word;
    }
    return lines.map(plain).join("<br>");
  }
  const rowsHeight = (chart) => {
    const row = Math.max(narrow(chart) && chart.bars.some((bar) => bar.length > 16) ? 34 : 25, chart.series.length > 1 ? 15 + 9 * chart.series.length : 0);
    return 84 + chart.bars.length * row;
  };

  function axis(spec, colours) {
    return {
      title: { text: plain(spec.title), font: { size: 12, color: colours.soft }, standoff: 8 },
      tickfont: { size: 11.5, color: colours.soft },
      gridcolor: colours.grid, zerolinecolor: colours.line, linecolor: colours.line,
      ticksuffix: spec.percent ? " %" : "", rangemode: spec.zero ? "tozero" : "normal",
      automargin: true, fixedrange: !matchMedia("(pointer: fine)").matches, // a finger scrolls the page, a mouse zooms
      nticks: 6, ...(spec.tick ? { dtick: spec.tick, tick0: 0 } : {}), ...(spec.range ? { range: spec.range } : {}), ...(spec.percent && spec.range?.[1] >= 100 ? { tickvals: hundred, ticktext: hundred.map((value) => `${value} %`) } : {}),
    };
  }

  function lineTraces(chart, colours) {
    const traces = [];
    for (const one of chart.series) {
      const colour = colourOf(one, colours);
      const turn = Math.max(0, one.style); // below zero: the neutral style
      const visible = shown(chart, one);
      if (one.low && one.high) {
        const keep = one.x.map((_, i) => i).filter((i) => one.low[i] !== null && one.high[i] !== null);
        const edge = { x: keep.map((i) => one.x[i]), mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, visible };
        traces.push({ ...edge, y: keep.map((i) => one.low[i]) });
        traces.push({ ...edge, y: keep.map((i) => one.high[i]), fill: "tonexty", fillcolor: faint(colour, colours.band) });
      }
      const few = chart.markers && one.x.length <= 60 && one.dash === null;
      const unit = chart.y.percent ? " %" : "";
      const digits = chart.y.percent ? ".1f" : ".4~g";
      traces.push({
        x: one.x, y: one.y, name: plain(one.label), visible, showlegend: one.legend,
        mode: few || one.x.length === 1 ? "lines+markers" : "lines",
        line: { color: colour, width: one.legend ? 2.2 : 1.5, dash: one.line },
        marker: { symbol: markers[turn % markers.length], size: 7, color: colour },
        ...(one.low ? { customdata: one.x.map((_, i) => [one.low[i], one.high[i]]) } : {}),
        hovertemplate: one.low ? `%{y:${digits}}${unit} (%{customdata[0]:${digits}} to %{customdata[1]:${digits}})` : `%{y:${digits}}${unit}`,
      });
    }
    for (const [label, height, above] of chart.lines) {
      const ends = chart.x.range || [Math.min(...chart.series.flatMap((one) => one.x)), Math.max(...chart.series.flatMap((one) => one.x))];
      traces.push({
        x: ends, y: [height, height], mode: "lines+text", name: plain(label), text: [`\u2002${plain(label)}`, ""], textposition: above ? "top right" : "bottom right",
        textfont: { size: 12, color: colours.soft }, line: { color: colours.soft, width: 1.4, dash: "dot" }, hoverinfo: "skip", showlegend: false,
      });
    }
    return traces;
  }

  // A dot with an interval for every row, several series side by side; hollow where the interval holds zero.
  function dotTraces(chart, colours) {
    const unit = chart.x.percent ? " %" : "";
    const digits = chart.x.percent ? ".1f" : ".3f";
    const traces = chart.lines.map(([label, value]) => ({
      x: [value, value], y: [-0.6, chart.bars.length - 0.4], mode: "lines+text", text: [plain(label), ""], textposition: "top center", cliponaxis: false,
      textfont: { size: 11.5, color: colours.soft }, line: { color: colours.soft, width: 1.4, dash: "dot" }, hoverinfo: "skip", showlegend: false,
    }));
    for (const one of chart.series) {
      const colour = colourOf(one, colours);
      const known = one.y.map((_, i) => i).filter((i) => one.y[i] !== null);
      const reach = (ends, sign) => known.map((i) => (ends?.[i] == null ? 0 : sign * (ends[i] - one.y[i])));
      traces.push({
        x: known.map((i) => one.y[i]), y: known.map((i) => i + one.offset), name: plain(one.label), visible: shown(chart, one), mode: "markers", cliponaxis: false,
        marker: { symbol: markers[Math.max(0, one.style) % markers.length], size: 8, color: known.map((i) => (one.filled[i] ? colour : colours.paper)), line: { color: colour, width: 1.8 } },
        error_x: { type: "data", symmetric: false, array: reach(one.high, 1), arrayminus: reach(one.low, -1), color: colour, thickness: 1.8, width: 0 },
        text: known.map((i) => plain(chart.bars[i])), customdata: known.map((i) => [one.low?.[i] ?? null, one.high?.[i] ?? null]),
        hovertemplate: `%{text}<br>%{x:${digits}}${unit} (%{customdata[0]:${digits}} to %{customdata[1]:${digits}})<extra>${chart.series.length > 1 ? plain(one.label) : ""}</extra>`,
      });
    }
    return traces;
  }

  function barTraces(chart, colours) {
    const tones = [0, 4, 5, 2].map((place) => colours.palette[place]);
    return chart.series.map((one, place) => ({
      type: "bar", orientation: "h", name: plain(one.label), x: one.y, y: chart.bars.map(plain),
      marker: { color: tones[place % tones.length], pattern: { shape: ["", "/", "x", "."][place % 4], solidity: 0.2, bgcolor: tones[place % tones.length], fgcolor: colours.card } },
      hovertemplate: "%{x:.3~g} s",
    }));
  }

  function figure(chart, isDark) {
    const colours = theme(isDark);
    const stack = chart.kind === "stack", dots = chart.kind === "dots";
    const rows = dots ? {
      autorange: false, range: [chart.bars.length - 0.4, -0.6], tickmode: "array", tickvals: chart.bars.map((_, i) => i), ticklabelstandoff: 6,
      ticktext: chart.bars.map((bar) => wrapped(bar, narrow(chart) ? 16 : 40)), ticksuffix: "", zeroline: false, fixedrange: true,
    } : {};
    return {
      data: stack ? barTraces(chart, colours) : dots ? dotTraces(chart, colours) : lineTraces(chart, colours),
      layout: {
        font: { family: font, size: 12.5, color: colours.text }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 48, r: 20, t: dots && chart.lines.length ? 24 : 8, b: 40 }, showlegend: stack, barmode: "stack", bargap: 0.45,
        legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal", font: { size: 12 } },
        hovermode: dots ? "closest" : stack ? "y unified" : "x unified", hoverdistance: 80,
        hoverlabel: { bgcolor: colours.card, bordercolor: colours.line, font: { family: font, size: 12.5, color: colours.text } },
        xaxis: { ...axis(chart.x, colours), showgrid: stack || dots, zeroline: dots, showline: !stack && !dots, ...(dots ? { tickangle: 0, nticks: narrow(chart) ? 4 : 6 } : stack ? {} : { hoverformat: ".4~g", unifiedhovertitle: { text: `${plain(chart.x.title)} %{x}` } }) },
        yaxis: { ...axis(chart.y, colours), zeroline: !stack, ...(stack ? { autorange: "reversed", ticksuffix: "  ", nticks: 0, showgrid: false } : {}), ...rows },
        dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
      },
    };
  }

  const config = { displayModeBar: false, responsive: true, showTips: false };
  const place = (id) => document.getElementById(`plot-${id}`);
  const narrow = (chart) => place(chart.id).clientWidth < 430;
  const makeRoom = (chart) => { if (chart.kind === "dots") place(chart.id).style.height = `${rowsHeight(chart)}px`; };
  Object.values(charts).forEach(makeRoom);

  function draw(id, paper = false) {
    const { data, layout } = figure(charts[id], report.isDark() && !paper);
    makeRoom(charts[id]);
    if (paper) Object.assign(layout, { width: 640, height: charts[id].kind === "dots" ? rowsHeight(charts[id]) : 260, autosize: false });
    drawn.add(id);
    return Plotly.react(place(id), data, layout, config);
  }

  const nearby = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) { nearby.unobserve(entry.target); draw(entry.target.dataset.chart); }
    }
  }, { rootMargin: "600px 0px" });
  for (const id of Object.keys(charts)) nearby.observe(place(id));
  const redraw = () => drawn.forEach((id) => draw(id));
  report.onTheme.push(redraw);
  addEventListener("beforeprint", () => Object.keys(charts).forEach((id) => draw(id, true)));
  addEventListener("afterprint", redraw);

  // --- methods can be hidden in all charts at once ---------------------------------------------------------------------------

  for (const button of document.querySelectorAll(".method")) {
    const { key } = button.dataset;
    const show = () => button.setAttribute("aria-pressed", String(!hidden.has(key)));
    show();
    button.addEventListener("click", () => {
      hidden.has(key) ? hidden.delete(key) : hidden.add(key);
      report.remember("hidden", [...hidden]);
      show();
      redraw();
    });
  }

  // --- downloads: figures in light colours on white, with a title and a legend, for documents -------------------------------

  async function download(id, format) {
    const chart = charts[id];
    let address;
    if (format === "csv") {
      address = URL.createObjectURL(new Blob([rows(chart).map((row) => row.map(cell).join(",")).join("\r\n")], { type: "text/csv" }));
    } else {
      const { data, layout } = figure(chart, false);
      Object.assign(layout, {
        title: { text: plain(chart.title), x: 0.02, font: { size: 15 } }, paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff",
        showlegend: true, margin: { l: 60, r: 20, t: 70, b: 50 },
      });
      address = await Plotly.toImage({ data, layout }, { format, width: 820, height: chart.kind === "dots" ? rowsHeight(chart) + 80 : 470, scale: format === "png" ? 2 : 1 });
    }
    const link = report.element("a");
    link.href = address;
    link.download = `${id}.${format}`;
    link.click();
  }
  for (const button of document.querySelectorAll("button[data-format]")) {
    button.addEventListener("click", () => download(button.dataset.chart, button.dataset.format));
  }

  // --- the numbers of a chart, for those who do not see it --------------------------------------------------------------------

  function rows(chart) {
    if (chart.kind === "stack") {
      return [["", ...chart.series.map((one) => one.label)], ...chart.bars.map((bar, i) => [bar, ...chart.series.map((one) => one.y[i])])];
    }
    if (chart.kind === "dots") {
      const names = chart.series.flatMap((one) => [one.label, "low", "high"]);
      return [["", ...names], ...chart.bars.map((bar, i) => [bar, ...chart.series.flatMap((one) => [one.y[i], one.low?.[i] ?? null, one.high?.[i] ?? null])])];
    }
    const head = [chart.x.title], columns = [];
    for (const one of chart.series) {
      const by = (values) => new Map(one.x.map((x, i) => [x, values[i]]));
      head.push(one.label); columns.push(by(one.y));
      if (one.low && one.high) { head.push("low", "high"); columns.push(by(one.low), by(one.high)); }
    }
    const steps = [...new Set(chart.series.flatMap((one) => one.x))].sort((a, b) => a - b);
    return [head, ...steps.map((x) => [x, ...columns.map((column) => column.get(x) ?? null)])];
  }

  // A spreadsheet takes a cell that begins with one of =+-@ for a formula: labels get an apostrophe, numbers stay.
  function cell(value) {
    if (value === null) return "";
    if (typeof value === "number") return String(value);
    return `"${(/^[=+\-@\t\r]/.test(value) ? "'" : "") + value.replace(/"/g, '""')}"`;
  }

  for (const details of document.querySelectorAll("details.numbers")) {
    details.addEventListener("toggle", () => {
      const box = details.querySelector("div");
      if (!details.open || box.firstChild) return;
      const table = report.element("table");
      rows(charts[details.dataset.chart]).forEach((row, i) => {
        const line = report.element("tr");
        row.forEach((value) => line.append(report.element(i ? "td" : "th", typeof value === "string" ? "" : "n", value === null ? "–" : typeof value === "string" ? report.visible(value) : String(value))));
        table.append(line);
      });
      box.append(table);
    });
  }
}
