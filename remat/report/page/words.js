// Units as the Python side writes them, and small helpers to build elements. Text always goes in
// as text: no name of a layer or a file is ever read as HTML.

function formatBytes(count) {
  const sign = count < 0 ? "−" : "", size = Math.abs(count);
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [1024, "KiB"]]) {
    if (size >= unit) return `${sign}${(size / unit).toFixed(size / unit < 10 ? 2 : 1)} ${name}`;
  }
  return `${sign}${size.toFixed(0)} B`;
}

function formatSeconds(seconds) {
  const sign = seconds < 0 ? "−" : "", size = Math.abs(seconds);
  if (size >= 1 || size === 0) return `${sign}${size.toFixed(2)} s`;
  return size >= 1e-3 ? `${sign}${(size * 1e3).toFixed(1)} ms` : `${sign}${(size * 1e6).toFixed(0)} µs`;
}

const signed = (text, number) => (number > 0 ? `+${text}` : text);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, run] of Object.entries(value)) made.addEventListener(event, run);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function drawing(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);
const fileAndLine = (source) => source.replace(/ in \S*$/, "").split("/").pop();
const ACTION_WORDS = ["keep", "recompute", "offload"];

// Four to seven round numbers from 0 to `high`; `base` 1024 for bytes.
function ticks(high, base) {
  if (!(high > 0)) return [0];
  const rough = high / 5;
  let power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const steps = base === 1024 ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] : [1, 2, 5, 10];
  const step = steps.map((m) => m * power).find((size) => size >= rough) || rough;
  const found = [];
  for (let k = 0; k * step <= high * 1.0001; k++) found.push(k * step);
  return found;
}
