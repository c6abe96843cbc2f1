// Draws the runs in the element `data` with uPlot. Texts of runs are put in place as text, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  // Colors of Okabe and Ito that are seen on both grounds, each with these dashes: more curves look alike.
  const COLORS = {
    light: ["#0072b2", "#d55e00", "#009e73", "#b0588c", "#3a9bd9", "#b87d00", "#555555"],
    dark: ["#4aa8e0", "#ff8a3d", "#2fcf9f", "#e59cc5", "#8ccdf5", "#f0b429", "#bbbbbb"],
  };
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [14, 6]];
  const MOST_SHOWN = COLORS.light.length * DASHES.length;
  const SHOWN_AT_FIRST = 20;
  const PLOT_HEIGHT = 230;
  const PRINTED_WIDTH = 340;
  const TIP_ROWS = 12;
  const POSITIONS = { iteration: "iteration", tokens: "consumed tokens", elapsed: "seconds of training" };
  const ENDED_WELL = ["ok", "unfinished", "running", "waiting", "queued", "done"];

  const runs = new Map(); // id → run
  const styles = new Map(); // id of a shown run → number of its color and dash
  const charts = new Map(); // key of a figure → { element, area, plot, shape, content, isVisible, isStale }
  const view = { x: "iteration", smoothing: 0, logX: false, logY: false, reference: "", filter: "", zoom: null };
  const darkScheme = matchMedia("(prefers-color-scheme: dark)");
  let isPrinting = false;

  // ---- elements ----

  function element(name, properties = {}, ...children) {
    const made = document.createElement(name);
    Object.assign(made, properties);
    made.append(...children);
    return made;
  }

  function swatch(id) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "swatch");
    svg.setAttribute("aria-hidden", "true");
    if (styles.has(id)) {
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      const attributes = { x1: 0, y1: 5, x2: 30, y2: 5, "stroke-width": 3, stroke: colorOf(id) };
      for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
      line.setAttribute("stroke-dasharray", dashOf(id).join(" "));
      svg.append(line);
    }
    return svg;
  }

  const theme = () => (darkScheme.matches && !isPrinting ? "dark" : "light");
  const colorOf = (id) => COLORS[theme()][styles.get(id) % COLORS.light.length];
  const dashOf = (id) => DASHES[Math.floor(styles.get(id) / COLORS.light.length)];

  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 6 });
  function numberText(value) {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-3 || size >= 1e15) return value.toExponential(3).replace(/\.?0+e/, "e");
    return size >= 1e5 ? compact.format(value) : String(Number(value.toPrecision(7)));
  }

  // ---- runs ----

  function decoded(curve) {
    let at = 0;
    return { at: curve.steps.map((step) => (at += step)), values: curve.values, ranks: curve.ranks || null };
  }

  function putRun(run) {
    const curves = {};
    for (const [key, curve] of Object.entries(run.curves)) curves[key] = decoded(curve);
    const isNew = !runs.has(run.id);
    runs.set(run.id, { ...run, curves });
    if (isNew && styles.size < SHOWN_AT_FIRST) show(run.id);
  }

  // Points after the iteration `after` are replaced by those of the update.
  function updateRun(update) {
    const run = runs.get(update.id);
    if (!run) return;
    for (const [key, curve] of Object.entries(update.curves)) {
      const added = decoded(curve);
      const old = run.curves[key];
      if (curve.after === undefined || !old) {
        run.curves[key] = added;
        continue;
      }
      let length = old.at.length;
      while (length > 0 && old.at[length - 1] > curve.after) length -= 1;
      for (const name of ["at", "values", "ranks"]) {
        if (!old[name] && !added[name]) continue;
        const before = old[name] || new Array(old.at.length).fill(null);
        const after = added[name] || new Array(added.at.length).fill(null);
        run.curves[key] = { ...run.curves[key], [name]: before.slice(0, length).concat(after) };
      }
    }
    Object.assign(run, update.head);
  }

  function removeRun(id) {
    runs.delete(id);
    styles.delete(id);
    if (view.reference === id) view.reference = "";
  }

  function show(id) {
    const used = new Set(styles.values());
    for (let number = 0; number < MOST_SHOWN; number += 1) {
      if (!used.has(number)) {
        styles.set(id, number);
        return;
      }
    }
  }

  const shownRuns = () => [...runs.values()].filter((run) => styles.has(run.id));

  function isFiltered(run) {
    const text = [run.name, run.status, ...run.differs.map((pair) => pair.join("="))].join(" ").toLowerCase();
    return view.filter.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  }

  // ---- curves ----

  function firstAtOrAfter(at, position) {
    let low = 0;
    let high = at.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at[middle] < position) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // The value at a position, linear between points; null outside of them.
  function interpolated(at, values, position) {
    const right = firstAtOrAfter(at, position);
    if (right === at.length) return null;
    if (at[right] === position) return values[right];
    if (right === 0 || values[right] === null || values[right - 1] === null) return null;
    const share = (position - at[right - 1]) / (at[right] - at[right - 1]);
    return values[right - 1] + share * (values[right] - values[right - 1]);
  }

  // The exponential mean of the values so far, without a bias to the first.
  function smoothed(values) {
    if (view.smoothing === 0) return values;
    let sum = 0;
    let weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = view.smoothing * sum + (1 - view.smoothing) * value;
      weight = view.smoothing * weight + (1 - view.smoothing);
      return sum / weight;
    });
  }

  function positions(run, at) {
    if (view.x === "iteration") return at;
    const curve = run.curves[view.x];
    return curve ? at.map((iteration) => interpolated(curve.at, curve.values, iteration)) : at.map(() => null);
  }

  // The points of a run in a figure as the view has them: { x, y, ranks }.
  function points(run, key, reference) {
    const curve = run.curves[key];
    const x = positions(run, curve.at);
    let y = smoothed(curve.values);
    if (reference) {
      const other = reference.curves[key];
      const otherX = positions(reference, other.at);
      const otherY = smoothed(other.values);
      y = y.map((value, i) => {
        const subtracted = value === null || x[i] === null ? null : interpolated(otherX, otherY, x[i]);
        return subtracted === null ? null : value - subtracted;
      });
    } else if (view.logY) {
      y = y.map((value) => (value !== null && value > 0 ? value : null));
    }
    const isDrawn = (i) => x[i] !== null && (!view.logX || x[i] > 0);
    const rows = x.map((_, i) => i).filter(isDrawn);
    return { x: rows.map((i) => x[i]), y: rows.map((i) => y[i]), ranks: curve.ranks && rows.map((i) => curve.ranks[i]) };
  }

  function figures() {
    const evaluations = new Set();
    for (const run of runs.values()) {
      for (const key of Object.keys(run.curves)) if (key.startsWith(data.evaluationPrefix)) evaluations.add(key);
    }
    const titles = [...evaluations].sort().map((key) => ({
      key, title: `Loss of ${key.slice(data.evaluationPrefix.length)}`, unit: "", isSetting: false,
    }));
    return [...data.figures.slice(0, 2), ...titles, ...data.figures.slice(2)];
  }

  function isConstant(members, key) {
    const values = new Set();
    for (const run of members) {
      for (const value of run.curves[key].values) {
        values.add(value);
        if (values.size > 1) return false;
      }
    }
    return true;
  }

  // ---- charts ----

  function drawCharts() {
    const area = document.getElementById("charts");
    const drawn = new Set();
    const contents = [];
    for (const figure of figures()) {
      const reference = runs.get(view.reference);
      let members = shownRuns().filter((run) => run.curves[figure.key] && run.curves[figure.key].at.length > 0);
      if (figure.isSetting && isConstant(members, figure.key)) continue;
      const subtracted = reference && reference.curves[figure.key] ? reference : null;
      if (reference && !subtracted) members = [];
      if (members.length > 0) contents.push({ figure, members, subtracted });
    }
    const all = contents.map(({ figure, members, subtracted }) =>
      members.map((run) => points(run, figure.key, subtracted)));
    let low = Infinity;
    let high = -Infinity;
    for (const { x } of all.flat()) {
      if (x.length > 0) {
        low = Math.min(low, x[0]);
        high = Math.max(high, x[x.length - 1]);
      }
    }
    contents.forEach(({ figure, members, subtracted }, number) => {
      drawn.add(figure.key);
      fillChart(area, figure, members, all[number], subtracted, [low, high]);
    });
    for (const [key, chart] of charts) {
      if (!drawn.has(key)) {
        if (chart.plot) chart.plot.destroy();
        visibility.unobserve(chart.element);
        chart.element.remove();
        charts.delete(key);
      }
    }
    const inOrder = contents.map(({ figure }) => charts.get(figure.key).element);
    if (inOrder.some((chart, number) => area.children[number] !== chart)) area.append(...inOrder);
  }

  // A chart that is not near the window is drawn when it comes there: many curves take a while.
  const visibility = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const chart = charts.get(target.dataset.figure);
      if (!chart || chart.element !== target) continue;
      chart.isVisible = isIntersecting;
      if (isIntersecting && chart.isStale) drawChart(chart);
    }
  }, { rootMargin: "300px" });

  function fillChart(area, figure, members, curves, subtracted, ends) {
    let chart = charts.get(figure.key);
    if (!chart) {
      const title = element("h3");
      const plot = element("div", { className: "plot" });
      const tip = element("div", { className: "tip", hidden: true });
      chart = { element: element("figure", { className: "chart" }, title, plot, tip), title, area: plot, tip, shape: "" };
      chart.element.dataset.figure = figure.key;
      charts.set(figure.key, chart);
      area.append(chart.element);
      visibility.observe(chart.element);
    }
    const unit = figure.unit ? ` ${figure.unit}` : "";
    const difference = subtracted ? ` minus ${subtracted.name}` : "";
    chart.title.replaceChildren(figure.title, element("span", { textContent: `${unit}${difference}` }));
    chart.element.setAttribute("aria-label", `${figure.title}${unit}${difference}: ${members.length} curves`);
    Object.assign(chart, { figure, members, curves, ends, isDifference: Boolean(subtracted), isStale: true });
    if (chart.isVisible || isPrinting) drawChart(chart);
  }

  function drawChart(chart) {
    const { figure, members, curves, ends } = chart;
    const sameEnds = ends[0] < ends[1] ? [ends, [null, null]] : [[ends[0]], [null]];
    const table = uPlot.join([...curves.map(({ x, y }) => [x, y]), sameEnds]);
    table.pop(); // the ends only give all charts the same x axis
    const isLogY = view.logY && !chart.isDifference && curves.some(({ y }) => y.some((value) => value !== null));
    const look = members.map((run) => [run.id, styles.get(run.id), run.name]);
    const shape = JSON.stringify([look, view.x, view.logX, isLogY, theme(), isPrinting]);
    chart.isStale = false;
    if (chart.plot && chart.shape === shape) {
      chart.plot.setData(table, false);
    } else {
      if (chart.plot) chart.plot.destroy();
      chart.shape = shape;
      chart.plot = new uPlot(options(chart, figure, isLogY), table, chart.area);
    }
    setRange(chart.plot);
    resize(chart);
  }

  function setRange(plot) {
    const xs = plot.data[0];
    const full = { min: xs[0], max: xs[xs.length - 1] };
    plot.setScale("x", view.zoom || full);
  }

  function options(chart, figure, isLogY) {
    const colors = theme() === "dark" ? { text: "#9aa7b5", grid: "#2a333d" } : { text: "#55616f", grid: "#e4e8ed" };
    const axis = {
      stroke: colors.text, grid: { stroke: colors.grid, width: 1 }, ticks: { stroke: colors.grid, width: 1 },
      font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
    };
    const texts = (plot, values) => values.map((value) => (value === null ? "" : numberText(value)));
    return {
      width: chartWidth(chart),
      height: PLOT_HEIGHT,
      legend: { show: false },
      padding: [8, 28, 0, 0],
      scales: { x: { time: false, distr: view.logX ? 3 : 1 }, y: { distr: isLogY ? 3 : 1 } },
      axes: [
        { ...axis, label: POSITIONS[view.x], labelSize: 18, size: 30, values: texts, space: 70 },
        {
          ...axis, values: texts,
          size: (plot, values) => 16 + 8 * Math.max(2, ...(values || []).map((value) => value.length)),
        },
      ],
      cursor: {
        sync: { key: "runs", scales: ["x", null] },
        drag: { x: true, y: false },
        dataIdx: (plot, series, index) => nearestWithValue(plot.data[series], index),
        points: { size: 6 },
      },
      series: [{}, ...chart.members.map((run) => ({
        label: run.name, stroke: colorOf(run.id), dash: dashOf(run.id), width: 1.6,
        points: { show: run.curves[figure.key].at.length <= 40, size: 5 },
      }))],
      hooks: {
        setCursor: [(plot) => showTip(chart, plot)],
        setScale: [(plot, key) => { if (key === "x") rememberZoom(plot); }],
      },
    };
  }

  function nearestWithValue(values, index) {
    for (let distance = 0; distance < values.length; distance += 1) {
      const left = values[index - distance];
      if (left !== null && left !== undefined) return index - distance;
      const right = values[index + distance];
      if (right !== null && right !== undefined) return index + distance;
    }
    return index;
  }

  function rememberZoom(plot) {
    const xs = plot.data[0];
    const { min, max } = plot.scales.x;
    if (xs.length === 0 || min === null || min === undefined) return;
    view.zoom = min <= xs[0] && max >= xs[xs.length - 1] ? null : { min, max };
  }

  function showTip(chart, plot) {
    const { left, top, idx: index } = plot.cursor;
    chart.tip.hidden = left < 0 || index === null || index === undefined || !plot.over.matches(":hover");
    if (chart.tip.hidden) return;
    const rows = chart.members.map((run, number) => {
      const values = plot.data[number + 1];
      const at = nearestWithValue(values, index);
      const value = values[at];
      const y = value === null || value === undefined ? null : plot.valToPos(value, "y");
      const { x, ranks } = chart.curves[number];
      const rank = ranks ? ranks[firstAtOrAfter(x, plot.data[0][at])] : null;
      return { run, value, x: plot.data[0][at], distance: y === null ? Infinity : Math.abs(y - top), rank };
    }).filter((row) => row.distance < Infinity);
    const nearest = rows.slice().sort((one, other) => one.distance - other.distance).slice(0, TIP_ROWS);
    nearest.sort((one, other) => other.value - one.value);
    const more = rows.length - nearest.length;
    chart.tip.replaceChildren(
      element("div", { textContent: `${POSITIONS[view.x]} ${numberText(plot.data[0][index])}` }),
      ...nearest.map(({ run, value, rank }) => element("div", {}, swatch(run.id),
        element("span", { className: "name", textContent: run.name }),
        element("b", { textContent: numberText(value) + (rank === null || rank === undefined ? "" : `, rank ${rank}`) }))),
      ...(more > 0 ? [element("div", { className: "faint", textContent: `and ${more} more` })] : []),
    );
    const area = chart.element.getBoundingClientRect();
    const over = plot.over.getBoundingClientRect();
    const isRight = left > over.width / 2;
    const x = over.left - area.left + left;
    chart.tip.style.left = isRight ? "" : `${x + 14}px`;
    chart.tip.style.right = isRight ? `${area.width - x + 14}px` : "";
    chart.tip.style.top = `${over.top - area.top + 8}px`;
  }

  const chartWidth = (chart) => (isPrinting ? PRINTED_WIDTH : Math.max(240, Math.floor(chart.area.clientWidth || 450)));

  function resize(chart) {
    const width = chartWidth(chart);
    if (chart.plot && chart.plot.width !== width) chart.plot.setSize({ width, height: PLOT_HEIGHT });
  }

  // ---- the table of runs ----

  function columnsOf(lists) {
    return [...new Set(lists.flatMap((pairs) => pairs.map(([name]) => name)))];
  }

  function drawTable() {
    const place = document.getElementById("runs");
    const focused = document.activeElement && document.activeElement.dataset.of;
    const all = [...runs.values()];
    const differing = columnsOf(all.map((run) => run.differs));
    const facts = columnsOf(all.map((run) => run.facts));
    const heading = (text, className) => element("th", { textContent: text, scope: "col", className });
    const head = element("tr", {}, heading("shown", "text shown"), heading("", "text"), heading("run", "text"),
      heading("status", "text"), ...differing.map((name) => heading(name, "")), ...facts.map((name) => heading(name, "")));
    const rows = all.filter(isFiltered).map((run) => {
      const box = element("input", { type: "checkbox", checked: styles.has(run.id) });
      box.dataset.of = run.id;
      box.setAttribute("aria-label", `show ${run.name}`);
      box.addEventListener("change", () => {
        if (box.checked) show(run.id);
        else styles.delete(run.id);
        draw();
      });
      const value = (pairs, name) => (pairs.find((pair) => pair[0] === name) || ["", ""])[1];
      const isBad = !ENDED_WELL.includes(run.status);
      const row = element("tr", {},
        element("td", { className: "text shown" }, box), element("td", { className: "text" }, swatch(run.id)),
        element("td", { className: "text name", textContent: run.name, title: run.name }),
        element("td", { className: isBad ? "text bad" : "text", textContent: run.status, title: run.reason }),
        ...differing.map((name) => element("td", { className: "differs", textContent: value(run.differs, name) })),
        ...facts.map((name) => element("td", { textContent: value(run.facts, name) })));
      row.classList.toggle("hidden", !styles.has(run.id));
      return row;
    });
    place.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
    if (focused) [...place.querySelectorAll("input")].find((box) => box.dataset.of === focused)?.focus();
    const shown = `${styles.size} of ${runs.size} runs are drawn`;
    const most = runs.size > MOST_SHOWN ? `, ${MOST_SHOWN} at most` : "";
    document.getElementById("count").textContent = runs.size === 0 ? "No run yet." : `${shown}${most}.`;
  }

  function drawTexts() {
    const lists = (id, title, members, content) => {
      const place = document.getElementById(id);
      const open = new Set([...place.querySelectorAll("details[open] summary")].map((summary) => summary.textContent));
      place.replaceChildren(...(members.length > 0 ? [element("h2", { textContent: title })] : []));
      for (const run of members) place.append(content(run, open));
    };
    const shown = shownRuns();
    const slow = shown.filter((run) => run.stragglers.length > 0);
    lists("stragglers", "Stragglers", slow.slice(0, 1), () => element("div", { className: "wide" }, stragglersTable(slow)));
    const withEvents = shown.filter((run) => run.events.length + run.problems.length > 0 || run.reason);
    lists("events", "Events", withEvents, (run, open) => {
      const summary = `${run.name}: ${run.events.length + run.problems.length + (run.reason ? 1 : 0)}`;
      const texts = [...(run.reason ? [`${run.status}: ${run.reason}`] : []), ...run.problems,
        ...run.events.map(([iteration, text]) => `iteration ${iteration}: ${text}`)];
      return element("details", { open: isPrinting || open.has(summary) }, element("summary", { textContent: summary }),
        element("ul", {}, ...texts.map((text) => element("li", { textContent: text }))));
    });
    lists("traces", "Traces of ranks", shown.filter((run) => run.gantt), (run) => element("figure", {},
      element("h3", { textContent: run.name }),
      ...(run.gantt.image ? [element("img", { src: run.gantt.image, alt: `Ranks of ${run.name} over time` })] : []),
      element("figcaption", { className: "faint", textContent: run.gantt.text })));
    const made = `Made by fugaku_gpt ${data.version}${data.live ? "" : `, ${data.made}`}. Drag in a plot to zoom, double-click to zoom out.`;
    const texts = [...data.notes, made];
    document.getElementById("notes").replaceChildren(...texts.map((text) => element("p", { textContent: text })));
  }

  function stragglersTable(members) {
    const titles = ["run", "rank", "node", "the slowest in", "computes longer than the fastest by"];
    const percent = (share) => (share === null ? "" : `${(100 * share).toFixed(1)} %`);
    const rows = members.flatMap((run) => run.stragglers.map(({ rank, node, share, excess }) => [run.name, rank, node,
      `${percent(share)} of lines`, percent(excess)]));
    return element("table", {},
      element("thead", {}, element("tr", {}, ...titles.map((text, i) => element("th", { textContent: text, scope: "col",
        className: i === 0 || i === 2 ? "text" : "" })))),
      element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((text, i) => element("td", {
        textContent: text, className: i === 0 || i === 2 ? "text" : "" }))))));
  }

  // ---- controls ----

  function control(label, input, event, change) {
    input.addEventListener(event, () => {
      change(input);
      draw();
    });
    return element("label", {}, label, input);
  }

  function makeControls() {
    const form = document.getElementById("controls");
    form.addEventListener("submit", (event) => event.preventDefault());
    const choice = (id, pairs) => element("select", { id }, ...pairs.map(([value, text]) => element("option", { value, textContent: text })));
    const strength = element("output", { textContent: "0" });
    form.append(
      control("x axis", choice("x", Object.entries(POSITIONS)), "change", (input) => { view.x = input.value; view.zoom = null; }),
      element("label", {}, control("smoothing", element("input", { id: "smoothing", type: "range", min: 0, max: 0.99, step: 0.01, value: 0 }),
        "input", (input) => { view.smoothing = Number(input.value); strength.textContent = input.value; }), strength),
      control("log x", element("input", { id: "log-x", type: "checkbox" }), "change", (input) => { view.logX = input.checked; view.zoom = null; }),
      control("log y", element("input", { id: "log-y", type: "checkbox" }), "change", (input) => { view.logY = input.checked; }),
      control("difference to", choice("reference", []), "change", (input) => { view.reference = input.value; }),
      element("button", { id: "reset", type: "button", textContent: "Reset zoom" }));
    document.getElementById("reset").addEventListener("click", () => { view.zoom = null; draw(); });
    const filter = element("input", { id: "filter", type: "search", placeholder: "name or setting, such as lr=0.001" });
    filter.addEventListener("input", () => { view.filter = filter.value; drawTable(); });
    const buttons = [["show-all", "Show these", (run) => show(run.id)], ["show-none", "Hide these", (run) => styles.delete(run.id)]];
    const tools = element("div", { className: "tools" }, element("label", {}, "filter ", filter), ...buttons.map(([id, textContent, change]) => {
      const button = element("button", { id, type: "button", textContent });
      button.addEventListener("click", () => {
        [...runs.values()].filter((run) => isFiltered(run) && (id === "show-none" || !styles.has(run.id))).forEach(change);
        draw();
      });
      return button;
    }), element("p", { id: "count" }));
    document.getElementById("runs").before(tools);
  }

  function drawReferences() {
    const select = document.getElementById("reference");
    const pairs = [["", "none"], ...[...runs.values()].map((run) => [run.id, run.name])];
    const texts = JSON.stringify(pairs);
    if (select.dataset.texts !== texts) {
      select.dataset.texts = texts;
      select.replaceChildren(...pairs.map(([value, text]) => element("option", { value, textContent: text })));
    }
    select.value = view.reference;
  }

  function draw() {
    drawReferences();
    drawTable();
    drawCharts();
    drawTexts();
  }

  // ---- a live page ----

  function follow() {
    const state = document.getElementById("state");
    const source = new EventSource(`events${location.search}`);
    let timer = null;
    const soon = () => { timer = timer || setTimeout(() => { timer = null; draw(); }, 100); };
    const on = (name, change) => source.addEventListener(name, (event) => {
      change(JSON.parse(event.data));
      state.textContent = `live, ${new Date().toLocaleTimeString()}`;
      soon();
    });
    on("begin", (ids) => [...runs.keys()].filter((id) => !ids.includes(id)).forEach(removeRun));
    on("run", putRun);
    on("update", updateRun);
    on("remove", removeRun);
    on("differences", (of) => Object.entries(of).forEach(([id, differs]) => { if (runs.has(id)) runs.get(id).differs = differs; }));
    on("notes", (notes) => { data.notes = notes; });
    source.addEventListener("end", () => {
      source.close();
      state.textContent = "no longer live: the server has ended";
    });
    source.onerror = () => {
      const isOver = source.readyState === EventSource.CLOSED;
      state.textContent = isOver ? "not live: the server refuses this page" : "connection lost; trying again";
    };
  }

  makeControls();
  data.runs.forEach(putRun);
  draw();
  darkScheme.addEventListener("change", draw);
  addEventListener("beforeprint", () => { isPrinting = true; draw(); });
  addEventListener("afterprint", () => { isPrinting = false; draw(); });
  new ResizeObserver(() => charts.forEach(resize)).observe(document.getElementById("charts"));
  if (data.live) follow();
  window.runPage = { charts, runs, view }; // for tests, and the curious
})();
