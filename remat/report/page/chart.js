// Memory over the step: stacked layers on a canvas, drawn a pixel column at a time. A column shows
// the largest of the steps that fall into it, so a peak is never lost.

const MARGIN = { left: 72, right: 10, top: 22, bottom: 24 };

class Chart {
  constructor(page, canvas, run, name) {
    Object.assign(this, { page, canvas, run, name });
    this.at = -1; // the step under the cursor
    this.stops = run.steps.flatMap((step, at) => (kindOf(step) === FREE ? [] : [at]));
    this.order = new Float64Array(run.steps.length + 1);
    let order = 0;
    run.steps.forEach((step, at) => {
      this.order[at] = order;
      if (kindOf(step) === COMPUTE) order += 1;
    });
    this.order[run.steps.length] = order;
    canvas.addEventListener("pointermove", (event) => this.point(event, false));
    canvas.addEventListener("pointerdown", (event) => this.point(event, true));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  // From where to where a step reaches, on the scale that is chosen.
  from(at) { return this.page.byTime ? this.run.starts[at] : this.order[at]; }
  to(at) { return this.page.byTime ? this.run.ends[at] : this.order[at + 1]; }
  get extent() {
    return this.page.byTime ? this.run.seconds : this.order[this.run.steps.length];
  }

  x(where) { return MARGIN.left + (where / this.page.extent) * this.plotWidth; }
  y(bytes) {
    const { low, high } = this.page;
    return MARGIN.top + (1 - (bytes - low) / (high - low)) * this.plotHeight;
  }

  point(event, hold) {
    const column = Math.floor(event.offsetX - MARGIN.left);
    if (hold) this.page.held = event.pointerType === "mouse" && !this.page.held;
    else if (this.page.held) return;
    const found = this.columns && this.columns[Math.max(0, Math.min(this.columns.length - 1, column))];
    if (found !== undefined && found >= 0) this.page.moveTo(this, found);
  }

  key(event) {
    if (event.key === "Escape") this.page.held = false;
    const { stops } = this, here = Math.max(0, stops.indexOf(this.at));
    const far = Math.max(1, Math.round(stops.length / 20));
    const next = {
      ArrowRight: here + 1, ArrowUp: here + 1, ArrowLeft: here - 1, ArrowDown: here - 1,
      PageUp: here + far, PageDown: here - far, Home: 0, End: stops.length - 1,
      p: stops.indexOf(this.run.peakStep), P: stops.indexOf(this.run.peakStep),
    }[event.key];
    if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const step = event.shiftKey && /^Arrow/.test(event.key) ? here + (next - here) * far : next;
    this.page.held = true;
    this.page.moveTo(this, stops[Math.max(0, Math.min(stops.length - 1, step))]);
  }

  // For every pixel column, the step with the most bytes.
  pick() {
    const width = Math.max(1, Math.floor(this.plotWidth));
    const columns = new Int32Array(width).fill(-1), { bytes } = this.run;
    for (const at of this.stops) {
      const first = Math.min(width - 1, Math.floor(this.x(this.from(at)) - MARGIN.left));
      const last = Math.ceil(this.x(this.to(at)) - MARGIN.left) - 1;
      for (let column = first; column <= Math.max(first, Math.min(last, width - 1)); column++) {
        if (columns[column] < 0 || bytes[at] > bytes[columns[column]]) columns[column] = at;
      }
    }
    return columns;
  }

  // The bytes of every group at the steps that are drawn.
  compose(columns) {
    const { problem, groups, groupOfOp } = this.page, wanted = new Set(columns), at = new Map();
    const bytesOf = new Float64Array(groups.length);
    const alive = new Uint8Array(problem.bytes.length), working = groups.length - 1;
    let writer = working; // the group of the op that ran last
    bytesOf[0] = problem.fixed;
    new Walk(problem, this.run.steps).run(this.run.steps.length, (position, walk) => {
      const step = this.run.steps[position], index = indexOf(step);
      const touched = kindOf(step) === COMPUTE ? problem.writes[index] : [index];
      if (kindOf(step) === COMPUTE) writer = groupOfOp[index];
      if (position === walk.boundary) touched.concat(problem.tangents).forEach(count);
      else touched.forEach(count);
      function count(value) {
        if (alive[value] === walk.alive[value] || problem.flags[value] & OWNED) return;
        alive[value] = walk.alive[value];
        const producer = problem.producer[value];
        const group = producer < 0 ? working : groupOfOp[producer];
        bytesOf[group] += alive[value] ? problem.bytes[value] : -problem.bytes[value];
      }
      if (!wanted.has(position)) return;
      const held = Float64Array.from(bytesOf);
      const rest = walk.used - walk.live; // workspace, second copies; below 0: written over
      if (rest >= 0) held[working] += rest;
      else held[writer] += rest;
      at.set(position, held);
    });
    return at;
  }

  resize() {
    const { canvas } = this, ratio = window.devicePixelRatio || 1;
    this.width = canvas.clientWidth;
    this.height = canvas.clientHeight;
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    this.plotWidth = this.width - MARGIN.left - MARGIN.right;
    this.plotHeight = this.height - MARGIN.top - MARGIN.bottom;
    this.columns = this.pick();
    this.held = this.compose(this.columns);
    this.layers = document.createElement("canvas"); // so that the cursor moves without redrawing
    this.layers.width = canvas.width;
    this.layers.height = canvas.height;
    this.paintLayers(this.layers.getContext("2d"), ratio);
    this.draw();
  }

  paintLayers(pen, ratio) {
    const { page } = this, { colours, solo } = page;
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    this.paintGrid(pen);
    const below = new Float64Array(this.columns.length);
    colours.forEach((colour, group) => { // a group at a time: a change of colour is dear
      pen.globalAlpha = solo >= 0 && solo !== group ? 0.15 : 1;
      pen.fillStyle = colour;
      this.columns.forEach((at, column) => {
        if (at < 0) return;
        const above = below[column] + Math.max(0, this.held.get(at)[group]);
        const top = this.y(Math.max(above, page.low));
        const height = this.y(Math.max(below[column], page.low)) - top;
        if (height > 0.02) pen.fillRect(MARGIN.left + column, top, 1.05, height);
        below[column] = above;
      });
    });
    pen.globalAlpha = 1;
    this.paintMarks(pen);
  }

  paintGrid(pen) {
    const { page } = this, { ink } = page;
    const right = this.width - MARGIN.right, floor = this.height - MARGIN.bottom;
    pen.strokeStyle = ink.line;
    pen.fillStyle = ink.muted;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const above of ticks(page.high - page.low, 1024)) {
      const y = Math.round(this.y(page.low + above)) + 0.5;
      pen.beginPath();
      pen.moveTo(MARGIN.left, y);
      pen.lineTo(right, y);
      pen.stroke();
      const label = page.low && above ? `+${formatBytes(above)}` : formatBytes(page.low + above);
      pen.fillText(label, MARGIN.left - 8, y);
    }
    pen.textBaseline = "top";
    const places = ticks(page.extent, 10).filter((_, k, all) => this.width > 500 || k % 2 === 0 || all.length < 4);
    for (const where of places) {
      const label = page.byTime ? (where ? formatSeconds(where) : "0") : where.toLocaleString("en");
      const x = this.x(where);
      if (x > right - 24) continue;
      pen.textAlign = where === 0 ? "left" : "center";
      pen.fillText(label, x, floor + 7);
    }
  }

  paintMarks(pen) {
    const { page } = this, { ink } = page, floor = this.height - MARGIN.bottom;
    pen.textBaseline = "alphabetic";
    for (const [at, label] of this.marks()) {
      const x = Math.round(this.x(at < this.run.steps.length ? this.from(at) : this.extent)) + 0.5;
      pen.strokeStyle = ink.muted;
      pen.setLineDash([2, 3]);
      pen.beginPath();
      pen.moveTo(x, MARGIN.top - 12);
      pen.lineTo(x, floor);
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = ink.muted;
      const room = this.width - x - 4 >= pen.measureText(label).width;
      pen.textAlign = room ? "left" : "right";
      pen.fillText(label, room ? x + 4 : x - 4, MARGIN.top - 8);
    }
    for (const [bytes, colour, dash] of [[page.data.budget, ink.budget, [7, 4]], [this.replayed(), ink.text, [2, 2]]]) {
      if (bytes === null || bytes < page.low) continue;
      pen.strokeStyle = colour;
      pen.lineWidth = 1.75;
      pen.setLineDash(dash);
      pen.beginPath();
      pen.moveTo(MARGIN.left, this.y(bytes));
      pen.lineTo(this.width - MARGIN.right, this.y(bytes));
      pen.stroke();
      pen.lineWidth = 1;
      pen.setLineDash([]);
    }
    if (this.run.peakStep < 0) return;
    const peak = this.run.peakStep, x = this.x((this.from(peak) + this.to(peak)) / 2);
    pen.fillStyle = ink.text;
    pen.beginPath();
    pen.moveTo(x, this.y(this.run.peak) - 2);
    pen.lineTo(x - 5, this.y(this.run.peak) - 10);
    pen.lineTo(x + 5, this.y(this.run.peak) - 10);
    pen.fill();
  }

  // What the generated code was seen to take belongs to the plan, not to the baseline.
  replayed() { return this.name === "after" ? this.page.data.replayed : null; }

  marks() {
    if (!this.page.data.marks.length) {
      return this.width > 320 ? [[this.run.boundary, "backward"]] : [];
    }
    const first = new Map();
    this.run.steps.forEach((step, at) => {
      if (kindOf(step) === COMPUTE && !first.has(indexOf(step))) first.set(indexOf(step), at);
    });
    const places = this.page.data.marks.map(([op, label]) => [first.get(op), label]);
    const next = new Map(places.map(([at], k) => [at, places[k + 1]]));
    let last = -1e9;
    return places.map(([at, label]) => {
      const x = this.x(this.from(at)), after = next.get(at);
      // What runs between the graphs is often short: the graphs' own labels come first.
      const crowded = label === "eager" && after && this.x(this.from(after[0])) - x < 70;
      const room = !crowded && x - last > 76;
      if (room) last = x;
      return [at, room ? label : ""];
    });
  }

  draw() {
    const pen = this.canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
    const { ink, selected } = this.page;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.layers, 0, 0);
    pen.scale(ratio, ratio);
    const floor = this.height - MARGIN.bottom;
    if (selected >= 0) {
      pen.fillStyle = ink.accent;
      for (const [from, to] of this.lives(selected)) {
        const x = this.x(from);
        pen.fillRect(x, floor + 1, Math.max(2, this.x(to) - x), 5);
      }
    }
    if (this.at < 0) return;
    const x = this.x((this.from(this.at) + this.to(this.at)) / 2);
    pen.strokeStyle = ink.text;
    pen.beginPath();
    pen.moveTo(x, MARGIN.top - 4);
    pen.lineTo(x, floor);
    pen.stroke();
    pen.fillStyle = ink.text;
    pen.beginPath();
    pen.arc(x, this.y(Math.max(this.page.low, this.run.bytes[this.at])), 3.5, 0, 7);
    pen.fill();
  }

  // From where to where each instance of a value is alive.
  lives(value) {
    const found = [];
    let since = -1;
    new Walk(this.page.problem, this.run.steps).run(this.run.steps.length, (at, walk) => {
      if (walk.alive[value] && since < 0) since = at;
      if (!walk.alive[value] && since >= 0) {
        found.push([this.from(since), this.to(at)]);
        since = -1;
      }
    });
    if (since >= 0) found.push([this.from(since), this.extent]);
    return found;
  }
}
