// The graph by layer: one line a block (or module) in program order; arcs in the margin are the
// bytes that forward passes from one to another.

class LayerGraph {
  constructor(page) {
    this.page = page;
    byId("modules").addEventListener("change", () => this.show());
    this.show();
  }

  // The rows, folded to blocks unless every module is asked for.
  fold() {
    const { data, problem } = this.page, { names } = data;
    const every = byId("modules").checked, blockOf = new Map();
    data.layers.forEach((layer, at) => blockOf.set(layer, every ? layer : data.blocks[at]));
    const rows = new Map();
    data.layers.forEach((layer) => {
      const name = blockOf.get(layer);
      if (!rows.has(name)) {
        rows.set(name, { name: names[name] || "(no module)", layers: new Set(), ops: 0, sizes: [0, 0, 0, 0, 0], from: new Map() });
      }
      rows.get(name).layers.add(layer);
    });
    for (const [layer, ...sizes] of data.rows) {
      const row = rows.get(blockOf.get(layer));
      sizes.forEach((size, k) => { row.sizes[k] += size; });
    }
    const seen = new Set();
    problem.layer.forEach((layer, op) => {
      const mine = blockOf.get(layer), row = rows.get(mine);
      row.ops += 1;
      if (problem.phase[op] === BACKWARD) return;
      for (const value of problem.reads[op]) {
        const producer = problem.producer[value];
        if (producer < 0) continue;
        const theirs = blockOf.get(problem.layer[producer]);
        const key = `${mine} ${value}`;
        if (theirs === mine || seen.has(key)) continue;
        seen.add(key);
        row.from.set(theirs, (row.from.get(theirs) || 0) + problem.bytes[value]);
      }
    });
    return rows;
  }

  show() {
    const rows = this.fold(), list = byId("graph"), { names } = this.page.data;
    const longest = Math.max(1, ...[...rows.values()].map(({ sizes }) => Math.max(sizes[0], sizes[1] + sizes[2] + sizes[3])));
    const lines = new Map();
    const ordered = element("ol");
    list.replaceChildren(drawing("svg", { "aria-hidden": "true" }), ordered);
    for (const [key, row] of rows) {
      if (!row.sizes.some(Boolean) && !row.from.size && row.ops === 0) continue;
      const line = this.line(row, longest, names);
      lines.set(key, line);
      ordered.append(line);
    }
    this.arcs(list, rows, lines);
    this.redraw = () => this.arcs(list, rows, lines);
  }

  line(row, longest, names) {
    const [before, held, again, moved, seconds] = row.sizes;
    const bar = element("span", { class: "bar" });
    for (const [size, name] of [[held, "kept"], [again, "again"], [moved, "moved"]]) {
      const part = element("span", { class: name });
      part.style.width = `${(100 * size) / longest}%`;
      if (size) bar.append(part);
    }
    const from = [...row.from].sort((a, b) => b[1] - a[1]).slice(0, 3)
      .map(([key, bytes]) => `${names[key] || "(no module)"} (${formatBytes(bytes)})`).join(", ");
    const more = row.from.size > 3 ? `, ${row.from.size - 3} more` : "";
    const name = element("button", { class: "link", type: "button", title: "show its decisions",
      on: { click: () => this.page.showLayers(row.layers, row.name) } }, row.name);
    const parts = [];
    if (held || before) parts.push(`keeps ${formatBytes(held)} (unasked ${formatBytes(before)})`);
    if (moved) parts.push(`offloads ${formatBytes(moved)}`);
    if (seconds) parts.push(signed(formatSeconds(seconds), seconds));
    parts.push(`${row.ops} op${row.ops === 1 ? "" : "s"}`);
    return element("li", {},
      element("span", { class: "name" }, name,
        from ? element("span", { class: "from" }, `reads from ${from}${more}`) : null),
      bar, element("span", { class: "sizes" }, parts.join(" · ")));
  }

  arcs(list, layers, lines) {
    const picture = list.querySelector("svg"), wide = picture.clientWidth || 74;
    const middles = new Map([...lines].map(([key, line]) => [key, line.offsetTop + line.offsetHeight / 2]));
    const order = new Map([...lines.keys()].map((key, at) => [key, at]));
    const edges = [...layers].flatMap(([key, row]) => [...row.from].map(([other, bytes]) => [other, key, bytes]))
      .filter(([a, b]) => lines.has(a) && lines.has(b)).sort((a, b) => b[2] - a[2]).slice(0, 400);
    const most = Math.max(1, ...edges.map(([, , bytes]) => bytes));
    const readers = new Map();
    for (const [a] of edges) readers.set(a, (readers.get(a) || 0) + 1);
    picture.replaceChildren();
    for (const [a, b, bytes] of edges) {
      const [from, to] = [middles.get(a), middles.get(b)], right = wide - 10;
      const rows = Math.abs(order.get(a) - order.get(b)), far = Math.min(1, Math.log2(1 + rows) / 5);
      const bulge = right - 8 - far * (right - 14);
      picture.append(drawing("path", {
        d: `M${right} ${from}C${bulge} ${from} ${bulge} ${to} ${right} ${to}`,
        "stroke-width": ((rows > 1 ? 0.5 : 1) * (1 + 3 * Math.sqrt(bytes / most))).toFixed(2),
        opacity: rows === 1 ? 0.7 : readers.get(a) > 8 ? 0.1 : 0.35, // a mask is read everywhere
      }));
    }
    for (const y of middles.values()) {
      picture.append(drawing("circle", { cx: wide - 10, cy: y, r: 3 }));
    }
  }
}
