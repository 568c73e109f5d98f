// Every decision, searched and sorted, a page at a time. What the other decision would do is
// simulated for the rows that are shown, and for all of them when the table is sorted by it.

const ROWS = 50;
const SLICE = 12; // milliseconds of simulating before the browser may draw again

class DecisionTable {
  constructor(page) {
    this.page = page;
    const { problem, data } = page, { names } = data;
    this.rows = data.decisions.map(([value, action, seconds], order) => {
      const op = problem.producer[value];
      const layer = names[problem.layer[op]], source = names[problem.source[op]];
      const text = [problem.valueName[value], layer, source, names[problem.target[op]]];
      return {
        order, value, action, seconds, layer, source, bytes: problem.bytes[value], at: problem.layer[op],
        name: problem.valueName[value], search: text.join("\n").toLowerCase(), then: null,
      };
    });
    this.rowOf = new Map(this.rows.map((row) => [row.value, row]));
    this.only = null; // the layers whose decisions are shown: all
    this.sortedBy = "bytes";
    this.down = true;
    this.start = 0;
    this.pending = 0;
    this.body = byId("decisions").tBodies[0];
    for (const button of document.querySelectorAll("#decisions th button")) {
      button.addEventListener("click", () => this.sortBy(button.dataset.by));
    }
    byId("search").addEventListener("input", () => this.filter());
    byId("action").addEventListener("change", () => this.filter());
    byId("only").addEventListener("click", () => {
      this.showLayers(null, "");
      byId("search").focus();
    });
    byId("sort").addEventListener("change", () => this.sortBy(byId("sort").value));
    byId("way").addEventListener("click", () => this.sortBy(this.sortedBy));
    byId("earlier").addEventListener("click", () => this.turn(-ROWS));
    byId("later").addEventListener("click", () => this.turn(ROWS));
    this.filter();
  }

  sortBy(column) {
    this.down = this.sortedBy === column ? !this.down : !["name", "layer", "source"].includes(column);
    this.sortedBy = column;
    this.filter();
  }

  // Only the decisions of these layers (indices of names), or of all where there are none given.
  showLayers(layers, name) {
    this.only = layers;
    byId("only").hidden = !layers;
    byId("only").textContent = `only ${name} ✕`;
    byId("only").setAttribute("aria-label", `Only ${name}: show all layers again`);
    this.filter();
  }

  filter() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const action = byId("action").value;
    this.found = this.rows.filter((row) =>
      (!this.only || this.only.has(row.at)) && (action === "" || row.action === Number(action)) && words.every((word) => row.search.includes(word)));
    const key = {
      name: (row) => row.name, layer: (row) => row.layer, source: (row) => row.source,
      bytes: (row) => row.bytes, action: (row) => row.action, seconds: (row) => row.seconds,
      peak: (row) => (row.then && !row.then.refused ? row.then.peak : null),
      time: (row) => (row.then && !row.then.refused ? row.then.seconds : null),
    }[this.sortedBy];
    const collator = new Intl.Collator("en", { numeric: true }), way = this.down ? -1 : 1;
    this.found.sort((a, b) => {
      const one = key(a), two = key(b);
      if (one === null || two === null) return (one === null) - (two === null) || a.order - b.order;
      const compared = typeof one === "string" ? collator.compare(one, two) : one - two;
      return compared * way || a.order - b.order;
    });
    this.start = 0;
    this.show();
  }

  turn(by) {
    this.start = Math.max(0, Math.min(this.found.length - 1, this.start + by));
    this.show();
    byId("decisions").scrollIntoView({ block: "nearest" });
  }

  show() {
    const shown = this.found.slice(this.start, this.start + ROWS);
    for (const head of document.querySelectorAll("#decisions th")) {
      const mine = head.querySelector("button").dataset.by === this.sortedBy;
      if (mine) head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    byId("sort").value = this.sortedBy;
    byId("way").textContent = this.down ? "descending ↓" : "ascending ↑";
    this.body.replaceChildren(...shown.map((row) => this.line(row)));
    const bytes = this.found.reduce((sum, row) => sum + row.bytes, 0);
    byId("count").textContent = this.found.length
      ? `${this.start + 1}–${this.start + shown.length} of ${this.found.length} decisions, ${formatBytes(bytes)} in all`
      : "no decision matches";
    byId("earlier").disabled = this.start === 0;
    byId("later").disabled = this.start + ROWS >= this.found.length;
    const byChange = this.sortedBy === "peak" || this.sortedBy === "time";
    this.simulate(byChange ? [...shown, ...this.found] : shown, () => byChange && this.filter());
  }

  line(row) {
    const cell = (label, content, number = false) =>
      element("td", { "data-label": label, class: number ? "number" : null }, content);
    const name = element("button", { class: "link code", type: "button",
      on: { click: () => this.page.select(row.value) } }, row.name);
    const line = element("tr", { class: row.value === this.page.selected ? "selected" : null },
      element("td", { "data-label": "value", class: "name" }, name),
      element("td", { "data-label": "layer", class: "name" }, element("span", {}, row.layer || "(no module)")),
      element("td", { "data-label": "source", class: "name" },
        element("span", { title: row.source }, fileAndLine(row.source) || "–")),
      cell("bytes", formatBytes(row.bytes), true),
      cell("action", element("span", { class: `action ${ACTION_WORDS[row.action]}` }, ACTION_WORDS[row.action])),
      cell("its cost", row.seconds ? signed(formatSeconds(row.seconds), row.seconds) : "–", true));
    row.cells = [cell("peak, the other way", "…", true), cell("time, the other way", "…", true)];
    line.append(...row.cells);
    if (row.then) this.fill(row);
    return line;
  }

  fill(row) {
    if (!row.cells) return;
    const [peak, time] = row.cells;
    if (row.then.refused) {
      peak.replaceChildren(element("span", { class: "muted", title: row.then.refused }, "cannot"));
      time.replaceChildren(element("span", { class: "muted" }, row.then.refused));
      time.classList.add("name");
      time.classList.remove("number");
      return;
    }
    const { budget } = this.page.data, change = row.then.peak - this.page.after.peak;
    const over = budget !== null && row.then.peak > budget;
    peak.replaceChildren(element("span", {
      class: over ? "over" : null,
      title: `the peak would be ${formatBytes(row.then.peak)}${over ? ", over the budget" : ""}`,
    }, change === 0 ? "same" : signed(formatBytes(change), change) + (over ? " (over)" : "")));
    time.textContent = Math.abs(row.then.seconds) < 1e-12 ? "same" : signed(formatSeconds(row.then.seconds), row.then.seconds);
  }

  // Simulate the other decision of these rows, a slice of time after the other.
  simulate(rows, then) {
    const left = [...new Set(rows)].filter((row) => row.then === null), mine = ++this.pending;
    const all = left.length;
    let todo = all;
    const work = () => {
      if (mine !== this.pending) return; // the table shows something else by now
      const until = performance.now() + SLICE;
      while (todo && performance.now() < until) {
        const row = left[all - todo--];
        row.then = change(this.page.problem, this.page.after, row.value, row.action);
        this.fill(row);
      }
      byId("working").textContent = todo > ROWS ? `simulating ${all - todo} of ${all}…` : "";
      if (todo) setTimeout(work, 0);
      else then();
    };
    if (all) work();
  }
}
