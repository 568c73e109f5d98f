// What the parts of the page share: the plan, the cursor, the chosen value, the colours.

class Page {
  constructor(data) {
    this.data = data;
    this.problem = new Problem(data);
    this.before = simulate(this.problem, data.before);
    this.after = simulate(this.problem, data.after);
    this.groups = ["resident", ...data.groups, "workspace, arriving gradients"];
    const groupOfName = new Map(data.layers.map((name, at) => [name, data.groupOf[at] + 1]));
    this.groupOfOp = this.problem.layer.map((name) => groupOfName.get(name));
    this.actionOf = new Map(data.decisions.map(([value, action]) => [value, action]));
    this.selected = -1;
    this.solo = -1;
    this.held = false;
    this.byTime = this.before.seconds > 0;
    this.check();
  }

  // Two accounts of one plan must agree; where they do not, the plan's own figures count.
  check() {
    const wrong = [["before", this.before.peak, this.data.baseline], ["after", this.after.peak, this.data.predicted]]
      .filter(([, mine, theirs]) => mine !== theirs);
    if (!wrong.length) return;
    const said = wrong.map(([name, mine, theirs]) => `${name}: ${formatBytes(mine)} here, ${formatBytes(theirs)} in the plan`);
    byId("alarm").hidden = false;
    byId("alarm").textContent = `This page's own simulation disagrees with the plan (${said.join("; ")}). The figures at the top are the plan's.`;
  }

  start() {
    this.colour();
    this.charts = [
      new Chart(this, byId("before"), this.before, "before"),
      new Chart(this, byId("after"), this.after, "after"),
    ];
    this.partners();
    this.controls();
    this.redraw();
    this.moveTo(this.charts[1], this.after.peakStep);
    this.table = new DecisionTable(this);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.colour();
      this.redraw();
    });
  }

  // What is far down the page waits until the top of it can be seen.
  finish() {
    this.graph = new LayerGraph(this);
    new ResizeObserver(() => {
      if (byId("before").clientWidth === this.charts[0].width) return;
      this.redraw();
      this.graph.redraw();
    }).observe(byId("charts"));
  }

  colour() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.ink = {
      text: read("--text"), muted: read("--muted"), line: read("--line"), accent: read("--accent"),
      budget: read("--budget"),
    };
    const dark = matchMedia("(prefers-color-scheme: dark)").matches, count = this.data.groups.length;
    const layers = this.data.groups.map((_, k) => {
      const hue = 265 - (275 * k) / Math.max(1, count - 1);
      const light = (dark ? 0.6 : 0.68) + (k % 2 ? 0.07 : 0);
      return `oklch(${light} 0.115 ${hue})`;
    });
    this.colours = [read("--resident"), ...layers, read("--working")];
  }

  controls() {
    byId("by-time").checked = this.byTime;
    byId("by-op").checked = !this.byTime;
    byId("by-time").disabled = !(this.before.seconds > 0);
    for (const name of ["by-time", "by-op", "from-resident"]) {
      byId(name).addEventListener("change", () => {
        this.byTime = byId("by-time").checked;
        this.redraw();
      });
    }
    const keys = [];
    if (this.data.budget !== null) keys.push(this.key("dash", "budget"));
    if (this.data.replayed !== null) keys.push(this.key("dash fine", "peak of the generated code"));
    byId("legend").replaceChildren(...this.groups.map((name, group) => this.chip(name, group)), ...keys);
  }

  key(name, text) {
    return element("li", { class: "key" }, element("span", { class: name }), text);
  }

  chip(name, group) {
    const swatch = element("span", { class: "swatch" });
    const chip = element("button", { type: "button", "aria-pressed": "false", title: "show it alone" }, swatch, name);
    chip.addEventListener("click", () => {
      this.solo = this.solo === group ? -1 : group;
      for (const [at, other] of byId("legend").querySelectorAll("button").entries()) {
        other.setAttribute("aria-pressed", String(at === this.solo));
      }
      this.redraw();
    });
    return element("li", {}, chip);
  }

  redraw() {
    byId("legend").querySelectorAll(".swatch").forEach((swatch, group) => {
      swatch.style.background = this.colours[group];
    });
    const highest = Math.max(this.before.peak, this.after.peak, this.data.budget || 0, this.data.replayed || 0);
    const lowest = byId("from-resident").checked ? this.data.fixed : 0;
    this.low = Math.min(lowest, highest - 1);
    // A budget far above everything would flatten the picture.
    const top = this.data.budget > 1.6 * Math.max(this.before.peak, this.after.peak)
      ? Math.max(this.before.peak, this.after.peak, this.data.replayed || 0) : highest;
    this.high = this.low + Math.max(1, (top - this.low) * 1.04);
    this.extent = Math.max(...this.charts.map((chart) => chart.extent)) || 1;
    for (const chart of this.charts) chart.resize();
  }

  // For every step of one schedule, the step of the other at which the same op runs; for an op
  // that runs again, the backward op that follows.
  partners() {
    const firstRuns = this.charts.map(({ run }) => {
      const first = new Map();
      run.steps.forEach((step, at) => {
        if (kindOf(step) === COMPUTE && !first.has(indexOf(step))) first.set(indexOf(step), at);
      });
      return first;
    });
    this.charts.forEach((chart, k) => {
      const mine = firstRuns[k], theirs = firstRuns[1 - k], { steps } = chart.run;
      chart.partner = new Int32Array(steps.length);
      let next = this.charts[1 - k].stops.at(-1) ?? -1;
      for (let at = steps.length - 1; at >= 0; at--) {
        const op = indexOf(steps[at]);
        if (kindOf(steps[at]) === COMPUTE && mine.get(op) === at) next = theirs.get(op);
        chart.partner[at] = next;
      }
    });
  }

  moveTo(chart, at) {
    if (at < 0) return;
    const other = this.charts[this.charts[0] === chart ? 1 : 0];
    chart.at = at;
    other.at = chart.partner[at];
    for (const each of this.charts) {
      each.draw();
      this.read(each);
    }
  }

  read(chart) {
    const { problem, data } = this, at = chart.at, { run } = chart;
    const step = run.steps[at], index = indexOf(step), compute = kindOf(step) === COMPUTE;
    const op = compute ? index : problem.producer[index];
    const names = data.names, layer = names[problem.layer[op]] || "(no module)";
    const place = `${compute ? "" : "transfer of "}${compute ? names[problem.target[op]] : problem.valueName[index]}`;
    const again = compute && run.steps.indexOf(step) < at;
    const phase = at >= run.boundary ? (again ? "recomputed in backward" : "backward") : "forward";
    const box = byId(`${chart.name}-readout`);
    const said = `${formatBytes(run.bytes[at])} at ${place}, ${layer}, ${phase}`;
    chart.canvas.setAttribute("aria-valuenow", chart.stops.indexOf(at) + 1);
    chart.canvas.setAttribute("aria-valuemax", chart.stops.length);
    chart.canvas.setAttribute("aria-valuetext", said);
    box.replaceChildren(
      element("h3", {}, `${chart.name === "before" ? "Before" : "After"}: ${formatBytes(run.bytes[at])}`,
        at === run.peakStep ? " (the peak)" : ""),
      element("div", { class: "where" }, element("code", {}, place), ` in ${layer}, ${phase}`),
      element("div", { class: "where muted" }, names[problem.source[op]] || "no source line", ` · at ${formatSeconds(run.starts[at])}`),
      this.alive(chart));
  }

  alive(chart) {
    const { problem } = this, { run } = chart, ROOM = 9;
    const walk = new Walk(problem, run.steps).run(chart.at + 1), found = [];
    walk.alive.forEach((alive, value) => {
      if (alive && !(problem.flags[value] & OWNED) && problem.bytes[value]) found.push(value);
    });
    found.sort((a, b) => problem.bytes[b] - problem.bytes[a]);
    const rest = found.slice(ROOM), list = element("ul");
    const row = (bytes, ...what) => list.append(element("li", {}, element("span", {}, formatBytes(bytes)), element("span", {}, ...what)));
    if (problem.fixed) row(problem.fixed, "resident: parameters, inputs, state");
    for (const value of found.slice(0, ROOM)) row(problem.bytes[value], ...this.describe(value, chart));
    if (rest.length) row(rest.reduce((sum, value) => sum + problem.bytes[value], 0), `${rest.length} smaller values`);
    const beside = walk.used - walk.live;
    if (beside) row(beside, beside > 0 ? "workspace and second copies" : "written over by this op");
    return list;
  }

  describe(value, chart) {
    const { problem, data } = this, producer = problem.producer[value];
    const layer = producer < 0 ? "" : data.names[problem.layer[producer]];
    const action = this.actionOf.get(value);
    let kind = "temporary";
    if (problem.flags[value] & IS_OUTPUT) kind = "output";
    else if (problem.flags[value] & TANGENT) kind = "arrives with backward";
    else if (producer >= 0 && problem.phase[producer] === BACKWARD) kind = "made in backward";
    else if (action !== undefined) kind = chart.name === "after" ? ACTION_WORDS[action] : "waits for backward";
    const name = problem.valueName[value];
    const label = action === undefined ? element("code", {}, name)
      : element("button", { class: "link code", type: "button", on: { click: () => this.select(value) } }, name);
    return [label, ` ${layer ? `${layer}, ` : ""}${kind}`];
  }

  select(value) {
    this.selected = this.selected === value ? -1 : value;
    for (const chart of this.charts) chart.draw();
    this.table.show();
    const row = this.table.rowOf.get(this.selected), note = byId("selected");
    note.hidden = !row;
    if (!row) return;
    const lives = this.charts.map((chart) => chart.lives(value).length);
    note.textContent = `${row.name} (${formatBytes(row.bytes)}, ${row.layer || "no module"}, ${row.source || "no source line"}): when it is alive is marked under both charts: ${lives[0]} time${lives[0] === 1 ? "" : "s"} before, ${lives[1]} after.`;
  }

  showLayers(layers, name) {
    byId("search").value = "";
    byId("action").value = "";
    this.table.showLayers(layers, name);
    byId("decisions-title").scrollIntoView();
    byId("only").focus({ preventScroll: true });
  }
}

const began = performance.now();
const page = new Page(JSON.parse(byId("plan").textContent));
page.start();
setTimeout(() => {
  page.finish();
  document.documentElement.dataset.ready = (performance.now() - began).toFixed(0);
}, 0);
