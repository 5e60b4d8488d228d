// The page of a kernel. Its state is in the fragment: the tab, the panes, what is selected, and the comparison.
"use strict";

const $ = (id) => document.getElementById(id);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== "") made.setAttribute(name, value);
  made.append(...children);
  return made;
}

async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).json();
}

// ---- colours ----

const WORDS = "asm|auto|bool|char|const|double|else|extern|float|for|if|int|long|namespace|return|static_cast|struct|" +
  "reinterpret_cast|sizeof|template|typename|unsigned|using|void|volatile|while|bf16|f16|__\\w+__";
const COLOURS = {
  graph: /(?<note>\{.*\})|(?<name>%\w+)|(?<key>(?<== )\w+|^return)/g,
  cuda: new RegExp(`(?<note>//.*)|(?<key>#\\w+|\\b(?:${WORDS})\\b)|(?<number>\\b\\d[\\w.]*)`, "g"),
  ptx: /(?<note>\/\/.*)|(?<name>%[\w.]+)|(?<key>(?<=^ *)\.\w+|(?<=^ *(?:@!?%\w+ +)?)[a-z][\w.:]*)|(?<number>\b\d\w*)/g,
  sass: /(?<note>\/\/.*|^[0-9a-f]+(?= ))|(?<key>(?<=^[0-9a-f]+ +(?:@!?\w+ +)?)[A-Z][\w.]*)|(?<name>\bU?[RPB][\dTZ]+\w*)|(?<number>\b0x\w+|\b\d[\w.]*)/g,
};

function coloured(text, language) {
  const indent = text.match(/^ */)[0];
  const code = make("code", {}, make("span", { class: "t-indent" }, indent));
  let done = indent.length;
  for (const found of text.matchAll(COLOURS[language])) {
    const [kind] = Object.entries(found.groups).find(([, value]) => value !== undefined);
    code.append(text.slice(done, found.index), make("span", { class: `t-${kind}` }, found[0]));
    done = found.index + found[0].length;
  }
  code.append(text.slice(done));
  return code;
}

// ---- the panes ----

const PANES = ["graph", "cuda", "ptx", "sass"];
const CHUNK = 50;
const state = { tab: "source", panes: PANES, sel: "", against: 0, language: "sass" };
const KERNEL = { cuda: /__global__/, ptx: /^\.visible \.entry/ };
const narrow = matchMedia("(max-width: 899px)");
const medium = matchMedia("(max-width: 1599px)");
let data, lines, panes;

// How many panes the window has room for, and those that it shows: the ones chosen last, which come first.
const room = () => (narrow.matches ? 1 : medium.matches ? 2 : PANES.length);
const open = () => state.panes.slice(0, room());

// What belongs to a selection, pane:line or value:name. Of lines without a value there is their statement alone.
function belongs(sel) {
  const [kind, key] = sel.split(":");
  const found = { values: new Set(), statements: new Set(), pane: kind, line: Number(key) };
  if (kind === "value") {
    found.values.add(key);
    data.statements.forEach(([, , values], n) => values.includes(key) && found.statements.add(n));
  } else if (lines[kind]?.of) {
    const statement = lines[kind].of[found.line - 1] ?? -1;
    if (statement >= 0) {
      found.statements.add(statement);
      for (const value of data.statements[statement][2]) found.values.add(value);
    }
  }
  return found;
}

function isLit(pane, n, found) {
  if (pane === found.pane && n === found.line - 1) return true;
  if (pane === "graph") return found.values.has(lines.graph.values[n]);
  return found.statements.has(lines[pane].of[n]);
}

const selectorOf = (pane, n) => (pane === "graph" ? `value:${lines.graph.values[n]}` : `${pane}:${n + 1}`);

function rowOf(pane, text, n) {
  const row = make("div", { class: "row", role: "option", id: `${pane}-${n + 1}`, "aria-selected": "false" });
  if (pane === "cuda" || pane === "ptx") row.append(make("span", { class: "number", "aria-hidden": "true" }, String(n + 1)));
  row.append(coloured(text, pane), labelOf(pane, n));
  return row;
}

// Beside a line: the type of an equation, the values of an instruction, or the function it comes from.
function labelOf(pane, n) {
  if (pane === "graph") return make("span", { class: "from" }, lines.graph.labels[n]);
  if (pane === "cuda") return "";
  const [inner, chain] = data.chains[lines[pane].from[n]];
  const values = data.statements[lines[pane].of[n]]?.[2] ?? [];
  const kind = values.length ? "from" : "from none";
  return make("span", { class: kind, title: chain }, values.map((value) => `%${value}`).join(" ") || inner);
}

class Pane {
  constructor(name) {
    this.name = name;
    this.frame = $(`pane-${name}`);
    this.list = this.frame.querySelector(".lines");
    this.rows = [];
    this.lit = [];
    this.at = 0;
    this.list.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.choose(this.rows.indexOf(row));
    });
    this.list.addEventListener("keydown", (event) => this.key(event));
  }

  build() {
    const made = lines[this.name].text.map((text, n) => rowOf(this.name, text, n));
    for (let n = 0; n < made.length; n += CHUNK) {
      const part = made.slice(n, n + CHUNK);
      const chunk = make("div", { class: this.name === "graph" ? "" : "chunk", role: "presentation" }, ...part);
      chunk.style.setProperty("--rows", part.length);
      this.list.append(chunk);
    }
    this.rows = made;
  }

  show(shown, found, moved) {
    const appears = shown && this.frame.hidden;
    this.frame.hidden = !shown;
    if (!shown) return;
    if (!this.rows.length) {
      this.build();
      this.begin();
    }
    for (const n of this.lit) this.mark(n, false, false);
    this.lit = this.rows.flatMap((_, n) => (isLit(this.name, n, found) ? [n] : []));
    for (const n of this.lit) this.mark(n, true, selectorOf(this.name, n) === state.sel);
    const of = `${this.rows.length} lines`;
    this.frame.querySelector(".count").textContent = this.lit.length ? `${this.lit.length} of ${of}` : of;
    if (this.lit.length && (appears || moved !== this.name)) this.move(this.lit[0]);
  }

  // Pixels from the upper edge of the pane to a line.
  above(n) {
    return this.rows[n].getBoundingClientRect().top - this.list.getBoundingClientRect().top;
  }

  // Ticks between the text and its scroll bar: of what fits they are beside the lines.
  tick() {
    const list = this.list;
    const ticks = this.frame.querySelector(".ticks");
    ticks.style.cssText = `top: ${list.offsetTop}px; height: ${list.clientHeight}px; ` +
      `right: ${list.offsetWidth - list.clientWidth}px`;
    ticks.replaceChildren(...this.lit.map((n) => {
      const made = make("i");
      made.style.top = `${(100 * (this.above(n) + list.scrollTop)) / list.scrollHeight}%`;
      return made;
    }));
  }

  // At the first kernel, with the comment above it.
  begin() {
    const { text } = lines[this.name];
    this.at = Math.max(0, text.findIndex((line) => KERNEL[this.name]?.test(line)));
    while (text[this.at - 1]?.startsWith("//")) this.at -= 1;
    this.list.scrollTop += this.above(this.at);
  }

  mark(n, lit, chosen) {
    this.rows[n].classList.toggle("lit", lit);
    this.rows[n].classList.toggle("chosen", chosen);
    this.rows[n].setAttribute("aria-selected", String(lit));
  }

  move(n) {
    this.rows[this.at]?.classList.remove("cursor");
    this.at = Math.max(0, Math.min(n, this.rows.length - 1));
    const row = this.rows[this.at];
    row.classList.add("cursor");
    this.list.setAttribute("aria-activedescendant", row.id);
    const top = this.above(this.at);
    const height = this.list.clientHeight;
    if (top < 0 || top > height - 40) this.list.scrollTop += top - height / 3;
  }

  choose(n) {
    this.move(n);
    select(selectorOf(this.name, n), this.name);
  }

  key(event) {
    const page = 20;
    const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -1e9, End: 1e9 };
    const sides = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in steps) this.move(this.at + steps[event.key]);
    else if (event.key in sides) beside(this.name, sides[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.choose(this.at);
    else if (event.key === "n") this.move(this.lit.find((n) => n > this.at) ?? this.at);
    else if (event.key === "p") this.move(this.lit.findLast((n) => n < this.at) ?? this.at);
    else if (event.key === "Escape") select("", this.name);
    else return;
    event.preventDefault();
  }
}

function tick() {
  for (const name of open()) panes[name].tick();
}

function beside(pane, step) {
  const among = room() < PANES.length ? PANES : PANES.filter((name) => state.panes.includes(name));
  const next = among[among.indexOf(pane) + step];
  if (!next) return;
  if (!open().includes(next)) state.panes = [next, pane].slice(0, room());
  render();
  panes[next].list.focus();
}

function select(sel, pane) {
  state.sel = sel === "value:" ? "" : sel;
  render(pane);
}

function described(found) {
  if (!state.sel) return "Select an equation, a statement, a line of PTX or an instruction.";
  const { pane, line } = found;
  const [inner, chain] = data.chains[lines[pane]?.from?.[line - 1] ?? 0];
  const values = [...found.values].map((value) => `%${value}`).join(", ");
  const statements = [...found.statements].map((n) => data.statements[n]);
  const text = statements.map(([a, b]) => (a === b ? a : `${a} to ${b}`)).join(", ");
  const cuda = text && `CUDA line${/\D/.test(text) ? "s" : ""} ${text}`;
  return [values || "No equation", cuda, inner && `from ${chain}`].filter(Boolean).join("; ");
}

// ---- a comparison ----

function compared() {
  const { title, texts, changes } = data.compare[state.against];
  const language = state.language;
  const [mine, theirs] = [lines[language].text, texts[language].split("\n")];
  const body = $("sides").tBodies[0];
  const rows = [];
  const pair = (left, right, changed) => rows.push(make("tr", {},
    ...side(left, changed && left !== undefined, "gone", "−"), ...side(right, changed && right !== undefined, "come", "+")));
  const side = (text, changed, kind, sign) => {
    const mark = make("td", { class: `mark ${changed ? kind : ""}` }, changed ? sign : "");
    return [mark, make("td", { class: changed ? kind : "" }, text === undefined ? "" : coloured(text, language))];
  };
  const same = (from, to, there) => {
    const few = 3;
    for (let n = from; n < to; n += 1) {
      if (to - from > 4 * few && n === from + few) {
        rows.push(folded(n, to - few, (m) => [...side(mine[m], false), ...side(theirs[m - from + there], false)]));
        n = to - few;
      }
      pair(mine[n], theirs[n - from + there], false);
    }
  };
  let [at, there] = [0, 0];
  for (const [a, b, c, d] of changes[language]) {
    same(at, a, there);
    for (let n = 0; n < Math.max(b - a, d - c); n += 1) {
      pair(a + n < b ? mine[a + n] : undefined, c + n < d ? theirs[c + n] : undefined, true);
    }
    [at, there] = [b, d];
  }
  same(at, mine.length, there);
  body.replaceChildren(...rows);
  $("other").textContent = title;
  const [gone, come] = [[0, 1], [2, 3]].map(([a, b]) => changes[language].reduce((sum, c) => sum + c[b] - c[a], 0));
  $("changes").textContent = `${gone} of ${mine.length} lines only here, ${come} of ${theirs.length} only there`;
}

function folded(from, to, cells) {
  const button = make("button", { type: "button" }, `${to - from} equal lines`);
  const row = make("tr", {}, make("td", { class: "fold", colspan: "4" }, button));
  button.addEventListener("click", () => {
    row.replaceWith(...Array.from({ length: to - from }, (_, n) => make("tr", {}, ...cells(from + n))));
  });
  return row;
}

// ---- the state ----

function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  const tabs = all("[role=tab]").map((tab) => tab.getAttribute("aria-controls"));
  if (tabs.includes(given.get("tab"))) state.tab = given.get("tab");
  const wanted = (given.get("panes") ?? "").split(",").filter((name) => PANES.includes(name));
  if (wanted.length) state.panes = wanted;
  state.sel = given.get("sel") ?? "";
  if (data.compare[given.get("against")]) state.against = Number(given.get("against"));
  if (["cuda", "sass"].includes(given.get("language"))) state.language = given.get("language");
}

function write() {
  const parts = { tab: state.tab };
  if (state.panes.length < PANES.length) parts.panes = state.panes.join(",");
  if (state.sel) parts.sel = state.sel;
  if (state.tab === "compare") Object.assign(parts, { against: state.against, language: state.language });
  const text = Object.entries(parts).map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  history.replaceState(null, "", `#${text.replaceAll("%3A", ":").replaceAll("%2C", ",")}`);
}

let built = "";

function render(moved = "") {
  for (const tab of all("[role=tab]")) {
    const chosen = tab.getAttribute("aria-controls") === state.tab;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
    $(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  document.body.classList.toggle("fitted", state.tab === "source");
  const shown = open();
  for (const button of all("#shown button")) {
    button.setAttribute("aria-pressed", String(shown.includes(button.getAttribute("aria-controls").slice(5))));
  }
  if (state.tab === "source") {
    const found = belongs(state.sel);
    for (const name of PANES) panes[name].show(shown.includes(name), found, moved);
    tick(); // when all panes have their widths
    $("status").textContent = described(found);
  }
  if (state.tab === "compare" && built !== `${state.against} ${state.language}`) {
    built = `${state.against} ${state.language}`;
    compared();
    $("against").selectedIndex = state.against;
    all(".uses").forEach((part, n) => { part.hidden = n !== state.against; });
    for (const button of all("#language button")) {
      button.setAttribute("aria-pressed", String(button.value === state.language));
    }
  }
  write();
}

function listen() {
  const tabs = all("[role=tab]");
  for (const [n, tab] of tabs.entries()) {
    tab.addEventListener("click", () => { state.tab = tab.getAttribute("aria-controls"); render(); });
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: n - 1, ArrowRight: n + 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = tabs[(to + tabs.length) % tabs.length];
      next.click();
      next.focus();
    });
  }
  for (const button of all("#shown button")) {
    button.addEventListener("click", () => {
      const name = button.getAttribute("aria-controls").slice(5);
      const others = open().filter((pane) => pane !== name);
      state.panes = others.length && open().includes(name) ? others : [name, ...others].slice(0, room());
      render();
    });
  }
  for (const button of all("#language button")) {
    button.addEventListener("click", () => { state.language = button.value; render(); });
  }
  $("against")?.addEventListener("change", (event) => { state.against = event.target.selectedIndex; render(); });
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
  addEventListener("hashchange", () => { read(); render(); });
  for (const width of [narrow, medium]) width.addEventListener("change", () => render());
  addEventListener("resize", () => { if (state.tab === "source") tick(); });
}

function themed() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const name = () => {
    const now = document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
    $("theme").textContent = now === "dark" ? "Light theme" : "Dark theme";
    return now;
  };
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = name() === "dark" ? "light" : "dark";
    name();
  });
  dark.addEventListener("change", name);
  name();
}

async function start() {
  themed();
  data = await inflated($("data").textContent);
  const ofLine = [];
  const cuda = data.cuda.split("\n");
  data.statements.forEach(([first, last], n) => { for (let line = first; line <= last; line += 1) ofLine[line - 1] = n; });
  const split = ({ text, ...rest }) => ({ text: text.split("\n"), ...rest });
  const [texts, labels, values] = [0, 1, 2].map((part) => data.graph.map((row) => row[part]));
  lines = {
    graph: { text: texts, labels, values },
    cuda: { text: cuda, of: cuda.map((_, n) => ofLine[n] ?? -1) },
    ptx: split(data.ptx),
    sass: split(data.sass),
  };
  panes = Object.fromEntries(PANES.map((name) => [name, new Pane(name)]));
  read();
  listen();
  render();
  document.documentElement.dataset.ready = Math.round(performance.now());
}

start().catch((error) => { $("status").textContent = `This browser cannot show the panes: ${error.message}`; });
