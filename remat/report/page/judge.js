// The judge, once more: bytes at every step of a schedule, seconds, and what one other decision
// would do. The same rules as solvers/simulate.py and report/changes.py; a test holds them equal.

const COMPUTE = 0, FREE = 1, OFFLOAD = 2, RELOAD = 3, WAIT = 4, KINDS = 5;
const FORWARD = 0, BACKWARD = 2;
const KEEP = 0, RECOMPUTE = 1;
const OWNED = 1, TANGENT = 2, IS_OUTPUT = 4, RETURNED = 8, NOT_KEEPABLE = 16;

const kindOf = (step) => step % KINDS;
const indexOf = (step) => Math.floor(step / KINDS);

class Problem {
  constructor(data) {
    const { values, ops } = data;
    this.fixed = data.fixed;
    this.link = data.link;
    this.bytes = values.bytes;
    this.flags = values.flags;
    this.valueName = values.name;
    this.opName = ops.name;
    this.names = data.names;
    this.target = ops.target;
    this.layer = ops.layer;
    this.source = ops.source;
    this.phase = ops.phase;
    this.seconds = ops.seconds;
    this.flops = ops.flops;
    this.workspace = ops.workspace;
    this.once = ops.once;
    this.reads = ops.reads;
    this.writes = ops.writes;
    this.producer = new Int32Array(this.bytes.length).fill(-1);
    this.writes.forEach((written, op) => written.forEach((v) => { this.producer[v] = op; }));
    this.forwardOps = this.phase.filter((phase) => phase === FORWARD).length;
    this.tangents = this.flags.flatMap((flags, v) => (flags & TANGENT ? [v] : []));
    this.noWrites = [];
  }

  // The values a step reads, and those it makes.
  readsOf(step) {
    const kind = kindOf(step);
    if (kind === COMPUTE) return this.reads[indexOf(step)];
    return kind === RELOAD ? this.noWrites : [indexOf(step)];
  }

  writesOf(step) {
    const kind = kindOf(step);
    if (kind === COMPUTE) return this.writes[indexOf(step)];
    return kind === RELOAD ? [indexOf(step)] : this.noWrites;
  }

  boundary(steps) {
    let left = this.forwardOps;
    for (let at = 0; at < steps.length; at++) {
      if (left === 0 && kindOf(steps[at]) !== FREE) return at;
      if (kindOf(steps[at]) === COMPUTE && this.phase[indexOf(steps[at])] === FORWARD) left -= 1;
    }
    return steps.length;
  }
}

// What is alive, step by step. `visit(at, walk)` is called after each step.
class Walk {
  constructor(problem, steps) {
    this.problem = problem;
    this.steps = steps;
    this.boundary = problem.boundary(steps);
    this.alive = new Uint8Array(problem.bytes.length);
    this.live = problem.fixed;
    this.overwritten = 0;
    this.used = problem.fixed;
    this.again = 0;
  }

  allocate(value) {
    if (this.alive[value]) return;
    this.alive[value] = 1;
    this.live += this.problem.bytes[value];
  }

  run(until, visit) {
    for (let at = 0; at < until; at++) {
      if (at === this.boundary) for (const value of this.problem.tangents) this.allocate(value);
      this.step(this.steps[at]);
      if (visit) visit(at, this);
    }
    return this;
  }

  step(step) {
    const { problem } = this, index = indexOf(step), kind = kindOf(step);
    if (kind === COMPUTE) {
      this.again = 0;
      for (const value of problem.writes[index]) {
        if (this.alive[value]) this.again += problem.bytes[value];
        else this.allocate(value);
      }
      const beside = this.again + problem.workspace[index];
      this.overwritten = Math.max(0, -beside);
      this.used = this.live + beside;
      return;
    }
    if (kind === FREE) {
      this.alive[index] = 0;
      this.live -= problem.bytes[index];
      this.overwritten = Math.max(0, this.overwritten - problem.bytes[index]);
    } else if (kind === RELOAD) {
      this.allocate(index);
    }
    this.used = this.live - this.overwritten;
  }
}

// {bytes, starts, ends, peak, peakStep, seconds, flops, boundary}: bytes and times of every step.
function simulate(problem, steps) {
  const count = steps.length;
  const bytes = new Float64Array(count), starts = new Float64Array(count);
  const ends = new Float64Array(count);
  const link = problem.link || [1, 1, 0], done = new Map();
  const freeAt = [0, 0];
  let seconds = 0, flops = 0, peak = problem.fixed, peakStep = -1;
  const transfer = (value, way) => {
    const begin = Math.max(seconds, freeAt[way]);
    const rate = link[way] ? problem.bytes[value] / link[way] : 0;
    freeAt[way] = begin + link[2] + rate;
    done.set(value, freeAt[way]);
  };
  const walk = new Walk(problem, steps);
  walk.run(count, (at) => {
    const step = steps[at], index = indexOf(step), kind = kindOf(step);
    starts[at] = seconds;
    if (kind === COMPUTE) {
      seconds += problem.seconds[index];
      flops += problem.flops[index];
    } else if (kind === OFFLOAD) transfer(index, 0);
    else if (kind === RELOAD) transfer(index, 1);
    else if (kind === WAIT) seconds = Math.max(seconds, done.get(index) || 0);
    ends[at] = seconds;
    bytes[at] = walk.used;
    if (peakStep < 0 || walk.used > bytes[peakStep]) peakStep = at;
  });
  if (peakStep >= 0) peak = Math.max(peak, bytes[peakStep]);
  return { steps, bytes, starts, ends, peak, peakStep, seconds, flops, boundary: walk.boundary };
}

// The schedule of these steps that frees every instance after it was last touched.
function withFrees(problem, events) {
  const readLater = new Uint8Array(problem.bytes.length), frees = new Array(events.length);
  const none = [];
  for (let at = events.length - 1; at >= 0; at--) {
    const reads = problem.readsOf(events[at]), writes = problem.writesOf(events[at]);
    let last = none;
    for (const list of [reads, writes]) {
      for (const value of list) {
        if (readLater[value] || problem.flags[value] & (OWNED | IS_OUTPUT)) continue;
        if (last === none) last = [];
        last.push(value);
      }
    }
    frees[at] = last;
    for (const value of writes) readLater[value] = 0;
    for (const value of reads) readLater[value] = 1;
  }
  const steps = [], alive = new Uint8Array(problem.bytes.length);
  for (const value of problem.tangents) alive[value] = 1;
  for (let at = 0; at < events.length; at++) {
    steps.push(events[at]);
    for (const value of problem.writesOf(events[at])) alive[value] = 1;
    for (const value of frees[at]) {
      if (!alive[value]) continue;
      steps.push(value * KINDS + FREE);
      alive[value] = 0;
    }
  }
  return steps;
}

// The ops that make `value` anew from what is alive, in program order.
function madeAgain(problem, value, alive) {
  const needed = new Set([problem.producer[value]]), left = [...needed];
  while (left.length) {
    for (const read of problem.reads[left.pop()]) {
      const producer = problem.producer[read];
      if (alive[read] || producer < 0 || needed.has(producer)) continue;
      if (problem.once[producer]) continue; // reading it holds it until then
      needed.add(producer);
      left.push(producer);
    }
  }
  return [...needed].sort((a, b) => a - b);
}

function recomputed(problem, steps, value) {
  const events = [], boundary = problem.boundary(steps);
  const alive = new Uint8Array(problem.bytes.length);
  for (const tangent of problem.tangents) alive[tangent] = 1;
  let done = false;
  steps.forEach((step, at) => {
    const index = indexOf(step), kind = kindOf(step);
    if (kind === FREE) {
      alive[index] = 0;
      return;
    }
    if (kind === COMPUTE) {
      if (!done && at >= boundary && problem.reads[index].includes(value)) {
        for (const op of madeAgain(problem, value, alive)) events.push(op * KINDS + COMPUTE);
        done = true;
      }
      for (const written of problem.writes[index]) alive[written] = 1;
    } else if (kind === RELOAD) {
      alive[index] = 1;
    }
    events.push(step);
  });
  return withFrees(problem, events);
}

function kept(problem, steps, value) {
  const producer = problem.producer[value], seen = new Set(), events = [], stays = [];
  for (const step of steps) {
    const kind = kindOf(step), index = indexOf(step);
    if (kind === FREE) continue;
    const first = kind !== COMPUTE || !seen.has(index);
    if (kind === COMPUTE) {
      seen.add(index);
      if (!first && index === producer) continue;
    }
    events.push(step);
    stays.push(first);
  }
  // Runs beyond the first that nobody reads the outcome of are left out.
  const readLater = new Uint8Array(problem.bytes.length), left = [];
  for (let at = events.length - 1; at >= 0; at--) {
    const writes = problem.writesOf(events[at]);
    if (!stays[at] && !writes.some((written) => readLater[written])) continue;
    for (const written of writes) readLater[written] = 0;
    for (const read of problem.readsOf(events[at])) readLater[read] = 1;
    left.push(events[at]);
  }
  return withFrees(problem, left.reverse());
}

// {other, peak, seconds} if the decision about `value` were the other one, or {other, refused}.
function change(problem, now, value, action) {
  const other = action === KEEP ? RECOMPUTE : KEEP, producer = problem.producer[value];
  if (problem.flags[value] & RETURNED) return { other, refused: "forward returns it" };
  if (other === RECOMPUTE && problem.once[producer]) {
    return { other, refused: "its op may run only once" };
  }
  const unkeepable = problem.writes[producer].some((v) => problem.flags[v] & NOT_KEEPABLE);
  if (other === KEEP && unkeepable) return { other, refused: "it may not be kept" };
  let steps;
  if (action === KEEP) steps = recomputed(problem, now.steps, value);
  else if (action === RECOMPUTE) steps = kept(problem, now.steps, value);
  else {
    const left = now.steps.filter(
      (step) => kindOf(step) !== FREE && (kindOf(step) === COMPUTE || indexOf(step) !== value));
    steps = withFrees(problem, left);
  }
  if (problem.link && inTheWay(problem, steps)) {
    return { other, refused: "a transfer is in the way" };
  }
  const then = simulate(problem, steps);
  return { other, peak: then.peak, seconds: then.seconds - now.seconds };
}

// Whether a step reads what is not back yet, or a transfer does not find what it moves.
function inTheWay(problem, steps) {
  const coming = new Set(), flying = new Set(), stored = new Set();
  let found = false;
  const alive = new Uint8Array(problem.bytes.length);
  for (const tangent of problem.tangents) alive[tangent] = 1;
  for (const step of steps) {
    const index = indexOf(step), kind = kindOf(step);
    if (kind === COMPUTE) {
      found ||= problem.reads[index].some((read) => coming.has(read));
      for (const written of problem.writes[index]) alive[written] = 1;
    } else if (kind === OFFLOAD) {
      found ||= !alive[index] || coming.has(index) || flying.has(index);
      flying.add(index);
    } else if (kind === RELOAD) {
      found ||= !stored.has(index) || alive[index] === 1;
      coming.add(index);
      alive[index] = 1;
    } else if (kind === WAIT) {
      found ||= !flying.has(index) && !coming.has(index);
      if (flying.delete(index)) stored.add(index);
      coming.delete(index);
    } else {
      found ||= flying.has(index) || coming.has(index);
      alive[index] = 0;
    }
  }
  return found;
}
