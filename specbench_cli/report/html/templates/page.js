// DOM helpers, the theme and the tooltip.

function element(name, attributes = {}, ...children) {
  const created = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) created.addEventListener(key.slice(2), value);
    else created.setAttribute(key, value === true ? "" : value);
  }
  created.append(...children.filter((child) => child !== null));
  return created;
}

function svgElement(name, attributes = {}, ...children) {
  const created = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) created.setAttribute(key, value);
  created.append(...children);
  return created;
}

function setUpTheme() {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const show = () => button.setAttribute("aria-pressed", String(dark()));
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  show();
}

const tip = {
  box: document.getElementById("tip"),
  owner: null,
  show(owner, lines) {
    this.hide();
    this.owner = owner;
    this.box.replaceChildren(...lines);
    this.box.hidden = false;
    owner.setAttribute("aria-describedby", "tip");
    this.place();
  },
  place() {
    const { owner } = this;
    const at = owner.getClientRects()[0] || owner.getBoundingClientRect();
    const { width, height } = this.box.getBoundingClientRect();
    const below = at.bottom + 8 + height < innerHeight;
    this.box.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8))}px`;
    this.box.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - height - 8)}px`;
  },
  hide() {
    if (this.owner) this.owner.removeAttribute("aria-describedby");
    this.owner = null;
    this.box.hidden = true;
  },
};

// Open all collapsed details while printing, because a reader cannot open them on paper.
function setUpPrint() {
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const each of closed) each.open = true;
  });
  addEventListener("afterprint", () => {
    for (const each of closed) each.open = false;
  });
}

function setUpTip() {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hide();
  });
  // A focused element keeps its tooltip while the page scrolls.
  const moved = () => {
    if (tip.owner && tip.owner === document.activeElement) tip.place();
    else tip.hide();
  };
  addEventListener("scroll", moved, { capture: true, passive: true });
}
