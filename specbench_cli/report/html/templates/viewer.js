// The token viewer: outputs side by side, with every token coloured by its origin.

const ORIGINS = {
  accepted: "accepted: a draft token that verification kept",
  recovered: "recovered: replaces the first rejected draft token",
  bonus: "bonus: the extra token after all draft tokens were accepted",
  plain: "plain: from a step without draft tokens",
  prefill: "prefill: the first token of the output",
  relaxed: "relaxed: a rejected draft token that a lossy rule kept",
  unknown: "unknown: not reported",
};

const HELP = "Point at a token, or use the arrow keys (up and down move by step), to see its origin, its probability and its time."
  + " Above each text are its steps: the width is the time, the height is the number of committed tokens."
  + " Below it is the draft of one step: filled boxes are accepted tokens (dotted: kept by a lossy rule), dashed boxes were added by verification, and the other tokens were not accepted.";

const milliseconds = (microseconds) => `${(microseconds / 1000).toFixed(microseconds < 100000 ? 2 : 1)} ms`;
const pluralize = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

// Describe the result of a step's draft.
function describeStep([levels, nodes, , accepted, committed, relaxed]) {
  const drafted = nodes > levels ? `${pluralize(nodes, "node")} on ${pluralize(levels, "level")}` : pluralize(levels, "token");
  return `${drafted} drafted, ${accepted} accepted, ${relaxed ? `${relaxed} relaxed, ` : ""}${committed} committed`;
}

// Return the data of each token of a method's output, by its index.
function makeTokens(turn, row) {
  const text = turn.texts[row.text];
  const origins = row.origin ? row.origin.flatMap(([word, n]) => Array(n).fill(word)) : [];
  const tokens = text.ids.map((id, index) => ({
    index, id, piece: text.pieces[index], origin: origins[index] || "unknown",
    logp: row.logp ? row.logp[index] : null, step: 0,
  }));
  let at = 1;
  (row.steps || []).forEach((step, number) => {
    for (let k = 0; k < step[4]; k += 1) tokens[at + k].step = number + 1;
    at += step[4];
  });
  return tokens;
}

function tokenLines(row, token) {
  const line = (...words) => element("span", {}, ...words);
  const lines = [line(element("b", {}, token.piece ? JSON.stringify(token.piece) : "part of a character"), ` token ${token.index}, id ${token.id}`)];
  lines.push(line(ORIGINS[token.origin] || token.origin));
  if (token.logp !== null) {
    lines.push(line(`probability ${Math.exp(token.logp).toPrecision(3)} (log ${token.logp.toFixed(3)})`));
  }
  if (row.steps && token.step) {
    lines.push(line(`step ${token.step} of ${row.steps.length}: ${describeStep(row.steps[token.step - 1])}`));
  }
  if (row.ends) {
    const end = row.ends[token.step];
    const begin = token.step ? row.ends[token.step - 1] : 0;
    lines.push(line(`${token.step ? "step" : "prefill"} ${milliseconds(end - begin)}, ${milliseconds(end)} since the start`));
  }
  if (row.differs === token.index) lines.push(line("the first token that differs from vanilla’s"));
  return lines;
}

function tokenName(token) {
  const piece = token.piece.trim() ? token.piece : token.piece.includes("\n") ? "line break" : token.piece ? "blank" : "part of a character";
  return `${piece}, ${token.origin}`;
}

// A method's output. It is one stop of the tab key, and arrow keys move inside it.
class Column {
  constructor(data, turn, row, longest) {
    this.data = data;
    this.turn = turn;
    this.row = row;
    this.tokens = makeTokens(turn, row);
    this.longest = longest;
    this.step = 0;
    const box = element("article", { class: "column", "aria-label": `${row.label}, turn ${turn.turn}` });
    box.append(
      element("h3", {}, row.label, data.peers.includes(row.label) ? element("span", { class: "tag" }, "peer") : null),
      element("p", { class: "stats" }, this.stats()),
    );
    this.strip = this.drawStrip();
    if (this.strip) box.append(this.strip);
    box.append(this.drawTokens());
    if (row.steps && row.steps.length) box.append(...this.drawSteps());
    this.box = box;
    if (row.steps && row.steps.length) this.select(this.mostInteresting());
  }

  stats() {
    const { row, tokens } = this;
    const parts = [pluralize(tokens.length, "token")];
    if (row.steps) {
      parts.push(pluralize(row.steps.length, "step"));
      if (row.steps.length) parts.push(`MAT ${((tokens.length - 1) / row.steps.length).toFixed(2)}`);
    }
    if (row.total !== null) parts.push(milliseconds(row.total));
    if (row.verdict && row.verdict !== "reference") parts.push(row.verdict);
    if (row.differs !== null) parts.push(`differs from vanilla at token ${row.differs}`);
    return parts.join(", ");
  }

  // Draw the steps on a time axis from left to right, with one scale for all columns.
  drawStrip() {
    const { ends, steps, total } = this.row;
    if (!ends || !this.longest) return null;
    const scale = 1000 / this.longest;
    const most = Math.max(1, ...steps.map((step) => step[4]));
    const strip = svgElement("svg", {
      class: "strip", viewBox: "0 0 1000 24", preserveAspectRatio: "none", role: "img",
      "aria-label": `prefill ${milliseconds(ends[0])}, then ${pluralize(steps.length, "step")}, all in ${milliseconds(total)}`,
    }, svgElement("rect", { class: "prefill", x: 0, y: 0, width: ends[0] * scale, height: 24 }));
    this.bars = steps.map((step, index) => {
      const height = 6 + (18 * step[4]) / most;
      const bar = svgElement("rect", {
        class: step[0] ? "step" : "step single", x: ends[index] * scale, y: 24 - height,
        width: Math.max(1, (ends[index + 1] - ends[index]) * scale), height,
      });
      const title = svgElement("title");
      title.textContent = `step ${index + 1}: ${pluralize(step[4], "token")} in ${milliseconds(ends[index + 1] - ends[index])}`;
      bar.append(title);
      bar.addEventListener("click", () => this.select(index + 1));
      strip.append(bar);
      return bar;
    });
    return strip;
  }

  drawTokens() {
    const list = element("div", {
      class: "tokens", role: "listbox", "aria-label": `Tokens of ${this.row.label}`, "aria-orientation": "horizontal",
    });
    this.spans = this.tokens.map((token, index) => {
      const begins = index > 0 && token.step !== this.tokens[index - 1].step;
      const special = token.piece === "" || /^<[^\s>]*>$/.test(token.piece);
      const classes = ["token", token.origin, begins && "begins", special && "special", this.row.differs === index && "differs"];
      return element("span", {
        class: classes.filter(Boolean).join(" "), role: "option", tabindex: index ? -1 : 0,
        "aria-selected": "false", "aria-label": tokenName(token), "data-index": index,
      }, token.piece === "" ? "◌" : token.piece.replace(/\n/g, "↵\n"));
    });
    list.append(...this.spans);
    const tokenAt = (event) => event.target.closest(".token");
    const show = (event) => {
      const span = tokenAt(event);
      if (span) tip.show(span, tokenLines(this.row, this.tokens[span.dataset.index]));
    };
    list.addEventListener("mouseover", show);
    list.addEventListener("mouseout", () => tip.hide());
    list.addEventListener("focusin", show);
    list.addEventListener("focusout", () => tip.hide());
    list.addEventListener("click", (event) => tokenAt(event) && this.focus(Number(tokenAt(event).dataset.index)));
    list.addEventListener("keydown", (event) => this.move(event));
    const holder = element("div", {}, list);
    holder.append(element("span", { class: "finish" }, `ends by ${this.row.finish}`));
    return holder;
  }

  focus(index) {
    const span = this.spans[Math.max(0, Math.min(index, this.spans.length - 1))];
    this.spans.forEach((each) => {
      each.tabIndex = each === span ? 0 : -1;
      each.setAttribute("aria-selected", String(each === span));
    });
    if (this.row.steps && this.row.steps.length) this.select(Math.max(1, this.tokens[span.dataset.index].step));
    span.focus();
  }

  // Left and right move by token, up and down by step.
  move(event) {
    const here = Number(event.target.dataset.index);
    const ofStep = (step) => this.tokens.findIndex((token) => token.step === step);
    const step = this.tokens[here].step;
    const last = this.tokens.length - 1;
    const to = {
      ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: last,
      ArrowDown: ofStep(step + 1) < 0 ? last : ofStep(step + 1),
      ArrowUp: step ? ofStep(step - 1) : 0,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.focus(to);
  }

  drawSteps() {
    this.caption = element("span", { class: "said", "aria-live": "polite" });
    this.previous = element("button", { type: "button", "aria-label": `Previous step of ${this.row.label}`, onclick: () => this.select(this.step - 1) }, "←");
    this.next = element("button", { type: "button", "aria-label": `Next step of ${this.row.label}`, onclick: () => this.select(this.step + 1) }, "→");
    this.treeBox = element("div", { class: "treebox", role: "region", tabindex: 0, "aria-label": `Draft of the step of ${this.row.label}` });
    return [element("div", { class: "stepbar" }, this.previous, this.next, this.caption), this.treeBox];
  }

  // Return the most informative step: the one with the largest tree or most accepted tokens.
  mostInteresting() {
    const width = this.row.steps.map(([levels, nodes, , accepted, , relaxed]) => (nodes > levels ? nodes : 0) + accepted + relaxed);
    return 1 + width.indexOf(Math.max(...width));
  }

  select(step) {
    const { row } = this;
    this.step = Math.max(1, Math.min(step, row.steps.length));
    const counters = row.steps[this.step - 1];
    const description = `Step ${this.step} of ${row.steps.length}: ${describeStep(counters)}`;
    this.caption.textContent = description;
    this.previous.disabled = this.step === 1;
    this.next.disabled = this.step === row.steps.length;
    this.spans.forEach((span, index) => span.classList.toggle("instep", this.tokens[index].step === this.step));
    (this.bars || []).forEach((bar, index) => bar.classList.toggle("current", index === this.step - 1));
    const draft = row.drafts ? row.drafts[this.step - 1] : null;
    this.treeBox.replaceChildren(draft ? drawTree(this.drafted(draft), description) : drawLane(counters, this.own().map((token) => token.origin), description));
  }

  // Return the tokens of the step.
  own() {
    return this.tokens.filter((token) => token.step === this.step);
  }

  // Return a step's draft with its texts, the origins of its path, and the token that verification added.
  drafted([words, parents, path]) {
    const own = this.own();
    const added = own.slice(path.length)[0];
    const before = this.tokens[own[0].index - 1];
    return {
      last: before ? before.piece : "", words: words.map((place) => this.data.words[place]), parents, path,
      kinds: path.map((_, level) => (own[level].origin === "relaxed" ? "relaxed" : "accepted")),
      added: added ? { text: added.piece, origin: added.origin } : null,
    };
  }
}

function legendOfOrigins(turns) {
  const used = new Set(turns.flatMap((turn) => turn.rows.flatMap((row) => (row.origin || [["unknown"]]).map(([word]) => word))));
  const items = Object.entries(ORIGINS).filter(([word]) => used.has(word)).map(([word, meaning]) =>
    element("li", {}, element("span", { class: `token ${word}` }, word), meaning.slice(word.length)));
  items.push(element("li", {}, element("span", { class: "token begins" }, " "), "a step begins"));
  return element("ul", { class: "legend" }, ...items);
}

class Viewer {
  constructor(place, data) {
    this.data = data;
    this.place = place;
    this.prompts = [...new Set(data.turns.map((turn) => turn.id))];
    this.prompt = element("select", { "aria-label": "Prompt", onchange: () => this.draw() },
      ...this.prompts.map((id) => new Option(`${id} (${this.turns(id)[0].family.replace(/_/g, " ")})`, id)));
    this.boxes = data.labels.map((label) =>
      element("input", { type: "checkbox", value: label, onchange: () => this.draw() }));
    for (const box of this.boxes) box.checked = this.first().includes(box.value);
    const step = (by) => () => {
      this.prompt.selectedIndex = (this.prompt.selectedIndex + by + this.prompts.length) % this.prompts.length;
      this.draw();
    };
    const line = (name, kind, ...content) =>
      element("div", { class: `line ${kind}` }, element("span", { class: "what" }, name), ...content);
    place.append(element("div", { class: "controls" },
      line("prompt", "", element("div", { class: "choices" }, this.prompt,
        element("button", { type: "button", "aria-label": "Previous prompt", onclick: step(-1) }, "←"),
        element("button", { type: "button", "aria-label": "Next prompt", onclick: step(1) }, "→"))),
      line("methods", "", element("div", { class: "choices", role: "group", "aria-label": "Methods to show" },
        ...this.boxes.map((box) => element("label", {}, box, box.value)))),
      line("legend", "keep", legendOfOrigins(data.turns)),
      element("p", { class: "note" }, HELP)));
    this.shown = element("div", { class: "shown" });
    place.append(this.shown);
    this.draw();
  }

  turns(id) {
    return this.data.turns.filter((turn) => turn.id === id);
  }

  // Return the two best methods without vanilla and peers. If there are fewer, other methods follow.
  first() {
    const ours = this.data.labels.filter((label) => label !== "vanilla" && !this.data.peers.includes(label));
    const best = ours.slice(0, 2);
    return best.length < 2 ? [...best, ...this.data.labels.filter((label) => !best.includes(label))].slice(0, 2) : best;
  }

  draw() {
    tip.hide();
    const chosen = this.boxes.filter((box) => box.checked).map((box) => box.value);
    this.shown.replaceChildren(...this.turns(this.prompt.value).flatMap((turn) => {
      const rows = chosen.map((label) => turn.rows.find((row) => row.label === label)).filter(Boolean);
      const longest = Math.max(0, ...rows.map((row) => (row.ends ? row.total : 0)));
      const several = this.turns(turn.id).length > 1;
      return [
        element("details", { class: "prompt" },
          element("summary", {}, several ? `The prompt, turn ${turn.turn}` : "The prompt"),
          element("pre", { tabindex: 0, "aria-label": "Text of the prompt" }, turn.text)),
        rows.length
          ? element("div", { class: "columns" }, ...rows.map((row) => new Column(this.data, turn, row, longest).box))
          : element("p", { class: "note" }, "No output of these methods on this prompt."),
      ];
    }));
  }
}

function setUpViewer() {
  const data = JSON.parse(document.getElementById("viewer-data").textContent);
  const place = document.getElementById("viewer");
  if (data.turns.length) new Viewer(place, data);
}

setUpTheme();
setUpTip();
setUpPrint();
setUpTables();
setUpViewer();
