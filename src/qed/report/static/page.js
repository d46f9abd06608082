"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  const figures = JSON.parse(document.getElementById("data").textContent).figures;
  const symbols = {gdn2: "square", qed: "circle", "qed-nogate": "triangle-up", "qed-noproj": "triangle-down",
    "qed-nogate-noproj": "diamond", "qed-rand": "cross"};
  const hiddenArms = new Set(), hiddenSeeds = new Set();
  let lengthScale = "log";

  const variable = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const shade = (arm) => variable(`--arm-${arm}`) || variable("--arm-other");
  const number = (value) => Math.abs(value) >= 1000 ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));

  // The same few percent as in the static drawing: intervals at one length must not hide each other.
  function dodged(series, spec) {
    const runs = spec.series.filter((one) => one.role === "run");
    if (spec.x.scale !== "log" || series.role !== "run" || runs.length < 2) return series.x;
    const shift = 2 ** (Math.min(0.12, 0.02 * runs.length) * (runs.indexOf(series) / (runs.length - 1) - 0.5));
    return series.x.map((x) => x * shift);
  }

  function trace(series, spec) {
    const colour = shade(series.arm), role = series.role;
    const mean = role === "mean", curve = role === "curve", paper = role === "paper", points = role === "points";
    const faded = spec.crowded && role === "run";
    const hover = series.x.map((x, i) => {
      if (series.hover) return `${series.label}<br>${series.hover[i]}`;
      const interval = series.low ? ` [${number(series.low[i])}, ${number(series.high[i])}]` : "";
      return `${series.label}<br>${number(x)}: ${number(series.y[i])}${interval}`;
    });
    const drawn = {
      type: "scatter", x: dodged(series, spec), y: series.y, name: series.label, text: hover, hoverinfo: "text",
      mode: curve || faded ? "lines" : points || series.hover ? "markers" : "lines+markers", showlegend: false,
      opacity: faded ? 0.4 : mean || paper ? 1 : 0.85,
      line: {color: colour, width: mean ? 3.2 : paper ? 1 : 1.4, dash: paper ? "dot" : series.faint ? "dash" : "solid"},
      marker: {color: colour, size: mean || points ? 9 : 6,
        symbol: paper ? "diamond-open" : points && series.faint ? "x-thin-open" : symbols[series.arm] || "x"},
    };
    if (series.low && !faded) {
      drawn.error_y = {type: "data", symmetric: false, color: colour, thickness: mean ? 1.8 : 1, width: 0,
        array: series.high.map((high, i) => high - series.y[i]), arrayminus: series.low.map((low, i) => series.y[i] - low)};
    }
    return drawn;
  }

  function axis(side, name, narrow) {
    const made = {title: {text: side.label, font: {size: 13}, standoff: 10}, gridcolor: variable("--rule"), zeroline: false,
      showgrid: name === "y", linecolor: variable("--muted"), showline: true, ticks: "outside", ticklen: 4,
      tickcolor: variable("--muted"), automargin: true, fixedrange: false};
    const lengths = name === "x" && side.scale === "log";
    const scale = lengths ? lengthScale : side.scale;
    made.type = scale === "log" ? "log" : "linear";
    if (side.ticks) {
      made.tickmode = "array";
      made.tickvals = side.ticks;
      made.ticktext = (side.tick_labels || side.ticks.map(String)).map((label) => label.replace("\n", "<br>"));
      if (lengths && scale === "linear") {
        const last = side.ticks[side.ticks.length - 1];
        const kept = side.ticks.filter((tick) => tick >= last / (narrow ? 4 : 8));
        made.tickvals = kept;
        made.ticktext = kept.map((tick) => made.ticktext[side.ticks.indexOf(tick)]);
      }
    }
    if (side.range) made.range = made.type === "log" ? side.range.map(Math.log10) : side.range;
    return made;
  }

  function draw(element) {
    const spec = figures[element.dataset.figure];
    const live = element.querySelector(".live");
    const narrow = live.clientWidth < 520;
    const shown = spec.series.filter((one) => !hiddenArms.has(one.arm) && (one.seed === null || !hiddenSeeds.has(one.seed)));
    const traces = shown.map((one) => trace(one, spec));
    const groups = new Map();
    for (const one of spec.series) {
      const name = one.role === "paper" ? "the paper" : one.group || one.arm_label;
      if (!groups.has(name)) groups.set(name, one);
    }
    for (const [name, one] of groups) {
      const paper = one.role === "paper", mean = one.role === "mean";
      const colour = paper ? variable("--muted") : shade(one.arm);
      traces.push({type: "scatter", x: [null], y: [null], name, hoverinfo: "skip",
        mode: one.role === "curve" ? "lines" : one.role === "points" ? "markers" : "lines+markers",
        line: {color: colour, width: mean ? 3.2 : 1.4, dash: paper ? "dot" : "solid"},
        marker: {color: colour, symbol: paper ? "diamond-open" : symbols[one.arm] || "x", size: mean ? 9 : 6}});
    }
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: false,
      font: {family: getComputedStyle(document.body).fontFamily, size: 13, color: variable("--ink")},
      margin: {l: 56, r: 12, t: 12, b: 48}, xaxis: axis(spec.x, "x", narrow), yaxis: axis(spec.y, "y", narrow),
      hoverlabel: {bgcolor: variable("--page"), bordercolor: variable("--muted"), font: {color: variable("--ink"), size: 13}},
      legend: {orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: {size: 13}, itemclick: false,
        itemdoubleclick: false},
      shapes: spec.marks.map((mark) => "x" in mark
        ? {type: "line", x0: mark.x, x1: mark.x, yref: "paper", y0: 0, y1: 1, layer: "below",
          line: {color: variable("--muted"), width: 1, dash: mark.solid ? "solid" : "dot"}}
        : {type: "line", xref: "paper", x0: 0, x1: 1, y0: mark.y, y1: mark.y, layer: "below",
          line: {color: variable("--muted"), width: 1}}),
      annotations: spec.marks.filter((mark) => "x" in mark && mark.label).map((mark) => ({
        x: layoutX(mark.x, spec.x), y: 0.12, yref: "paper", text: mark.label, showarrow: false, xanchor: "left", xshift: 4,
        yanchor: "bottom", font: {size: 12, color: variable("--muted")}})),
    };
    return Plotly.react(live, traces, layout, {responsive: true, displayModeBar: false, scrollZoom: false});
  }

  const layoutX = (x, side) => side.scale === "log" && lengthScale === "log" ? Math.log10(x) : x;

  const visible = new Set();
  function show(element) {
    const live = element.querySelector(".live");
    live.hidden = false;
    element.classList.add("ready");
    visible.add(element);
    return draw(element);
  }
  const redraw = () => visible.forEach(draw);

  function toggle(set, value) {
    return (event) => {
      if (event.target.checked) set.delete(value); else set.add(value);
      redraw();
    };
  }

  function group(title, entries) {
    const box = document.createElement("fieldset"), legend = document.createElement("legend");
    legend.textContent = title;
    box.append(legend);
    for (const {text, colour, changed} of entries) {
      const label = document.createElement("label"), input = document.createElement("input");
      input.type = "checkbox";
      input.checked = true;
      input.addEventListener("change", changed);
      label.append(input);
      if (colour) {
        const swatch = document.createElement("span");
        swatch.className = "swatch";
        swatch.style.background = `var(--arm-${colour}, var(--arm-other))`;
        label.append(swatch);
      }
      label.append(text);
      box.append(label);
    }
    return box;
  }

  function controls() {
    const every = Object.values(figures).flatMap((figure) => figure.series);
    const arms = new Map(every.filter((one) => one.arm_label).map((one) => [one.arm, one.arm_label]));
    const seeds = [...new Set(every.map((one) => one.seed).filter((seed) => seed !== null))].sort((a, b) => a - b);
    const bar = document.getElementById("controls");
    if (arms.size > 1) bar.append(group("Arms", [...arms].map(([arm, text]) =>
      ({text, colour: arm, changed: toggle(hiddenArms, arm)}))));
    if (seeds.length > 1) bar.append(group("Seeds", seeds.map((seed) =>
      ({text: String(seed), changed: toggle(hiddenSeeds, seed)}))));
    const scale = document.createElement("button");
    scale.type = "button";
    scale.id = "scale";
    scale.textContent = "Length: log";
    scale.addEventListener("click", () => {
      lengthScale = lengthScale === "log" ? "linear" : "log";
      scale.textContent = `Length: ${lengthScale}`;
      redraw();
    });
    const theme = document.createElement("button");
    theme.type = "button";
    theme.id = "theme";
    theme.textContent = "Light / dark";
    theme.addEventListener("click", () => {
      const dark = getComputedStyle(root).colorScheme === "dark";
      root.dataset.theme = dark ? "light" : "dark";
      redraw();
    });
    bar.append(scale, theme);
    bar.hidden = false;
  }

  controls();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const waiting = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        waiting.unobserve(entry.target);
        show(entry.target);
      }
    }
  }, {rootMargin: "400px"});
  document.querySelectorAll("figure[data-figure]").forEach((element) => waiting.observe(element));
})();
