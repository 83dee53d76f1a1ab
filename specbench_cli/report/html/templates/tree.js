// The draft of one step: a tree from left to right, or a lane if its tokens were not stored.

const NODE = { width: 60, height: 22, across: 76, down: 28, margin: 8, maxLetters: 7 };

function shorten(text) {
  const shown = text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "␣");
  return shown.length > NODE.maxLetters ? `${shown.slice(0, NODE.maxLetters - 1)}…` : shown;
}

// Set the position of each node and return the size of the tree in rows and columns. A first child is
// in its parent's row. Other branches go below, those of deeper nodes first, each in the first free
// row. So no edges cross.
function layOut(root, nodes) {
  nodes.forEach((node) => node.parent.children.push(node));
  // Accepted nodes come first, so that the accepted path is a straight line along the top.
  [root, ...nodes].forEach((node) => node.children.sort((a, b) => b.taken - a.taken));
  const free = [];
  const place = (node, depth, least) => {
    const line = [node];
    while (line[line.length - 1].children.length) line.push(line[line.length - 1].children[0]);
    const row = Math.max(least, ...line.map((_, along) => free[depth + along] || 0));
    line.forEach((each, along) => {
      Object.assign(each, { depth: depth + along, row });
      free[depth + along] = row + 1;
    });
    for (let along = line.length - 1; along >= 0; along -= 1) {
      line[along].children.slice(1).forEach((child) => place(child, depth + along + 1, row + 1));
    }
  };
  place(root, 0, 0);
  return { rows: Math.max(...free), columns: free.length };
}

// step: { last, words, parents, path, kinds (of the path), added: {text, origin} or null }
function draftNodes(step) {
  const root = { text: step.last, kind: "root", taken: true, children: [] };
  const onPath = new Map(step.path.map((index, level) => [index, step.kinds[level]]));
  const nodes = step.words.map((text, index) => ({
    text, kind: onPath.get(index) || "left", taken: onPath.has(index), children: [],
  }));
  nodes.forEach((node, index) => {
    const parent = step.parents ? step.parents[index] : index - 1;
    node.parent = parent < 0 ? root : nodes[parent];
  });
  if (step.added) {
    const end = step.path.length ? nodes[step.path[step.path.length - 1]] : root;
    nodes.push({ text: step.added.text, kind: step.added.origin, taken: true, added: true, children: [], parent: end });
  }
  return [root, nodes];
}

function drawTree(step, description) {
  const [root, nodes] = draftNodes(step);
  const { rows, columns } = layOut(root, nodes);
  const width = (columns - 1) * NODE.across + NODE.width + 2 * NODE.margin;
  const height = (rows - 1) * NODE.down + NODE.height + 2 * NODE.margin;
  const x = (node) => NODE.margin + node.depth * NODE.across;
  const y = (node) => NODE.margin + node.row * NODE.down + NODE.height / 2;
  const edges = [...nodes].sort((a, b) => a.taken - b.taken).map((node) => {
    const [x0, y0, x1, y1] = [x(node.parent) + NODE.width, y(node.parent), x(node), y(node)];
    const middle = (x0 + x1) / 2;
    const kind = node.added ? "added" : node.taken ? "taken" : "left";
    return svgElement("path", { class: kind, d: `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}` });
  });
  const boxes = [root, ...nodes].map((node) => {
    const label = svgElement("text", { x: x(node) + NODE.width / 2, y: y(node), "text-anchor": "middle" });
    label.textContent = shorten(node.text);
    const title = svgElement("title");
    title.textContent = `${JSON.stringify(node.text)} ${node.kind === "left" ? "not accepted" : node.kind}`;
    return svgElement("g", { class: `node ${node.kind}` },
      title,
      svgElement("rect", { x: x(node), y: y(node) - NODE.height / 2, width: NODE.width, height: NODE.height, rx: 4 }),
      label);
  });
  return svgElement("svg", { class: "tree", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": description },
    ...edges, ...boxes);
}

// Draw a step whose tokens were not stored, from its counters: one box per level, and one for each
// token that verification adds. `origins` has the origin of each committed token of the step.
function drawLane([levels, , tested, accepted, committed, relaxed], origins, description) {
  const lane = element("div", { class: "lane", role: "img", "aria-label": description });
  const box = (kind, mark) => lane.append(element("i", { class: kind }, mark));
  for (let level = 0; level < levels; level += 1) {
    if (level < accepted + relaxed && origins[level] === "relaxed") box("relaxed", "~");
    else if (level < accepted + relaxed) box("accepted", "=");
    else if (level < tested) box("rejected", "×");
    else box("untested", "·");
  }
  for (let token = accepted + relaxed; token < committed; token += 1) box("added", "+");
  return lane;
}
