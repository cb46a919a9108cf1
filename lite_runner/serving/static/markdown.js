// Markdown as elements. Every piece of the text becomes a text node; nothing of it is read as HTML,
// and nothing is fetched: an image is a link, and links are of http and https alone.

const DEEPEST = 8; // quotes and lists in one another; beyond, their text as it stands
const LONGEST = 20_000; // characters of a paragraph with emphasis
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Shows a growing text. Elements of blocks that have not changed stay, and so does what a
 * reader has selected in them. */
export class Markdown {
  element = made("div", "markdown");
  #shown = []; // the source of each block

  show(text) {
    const found = split(text.split("\n"));
    const sources = found.map((block) => block.join("\n"));
    let same = 0;
    while (same < sources.length && sources[same] === this.#shown[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.element.append(...found.slice(same).map((block) => blockOf(block, 0)));
    this.#shown = sources;
  }
}

/** A button that copies what `text()` is then. */
export function copyButton(text, label) {
  const button = made("button", "copy", "Copy");
  button.type = "button";
  button.ariaLabel = label;
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text(), button)) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
}

async function copied(text, button) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return false;
    }
  }
  // The page of another machine without TLS has no clipboard of its own.
  const area = made("textarea", "unseen");
  area.value = text;
  button.after(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  button.focus();
  return done;
}

/** The lines of each block. */
function split(lines) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = endOf(lines, at);
    found.push(lines.slice(at, end));
    at = end;
  }
  return found;
}

/** The line behind the block that begins at one. */
function endOf(lines, at) {
  const line = lines[at];
  let end = at + 1;
  const fence = FENCE.exec(line);
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(line) || RULE.test(line)) return end;
  if (QUOTE.test(line)) {
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return end;
  }
  if (ITEM.test(line)) return endOfList(lines, at);
  if (isTable(lines, at)) {
    while (end < lines.length && lines[end].includes("|")) end += 1;
    return end;
  }
  while (end < lines.length && lines[end].trim() && !begins(lines, end)) end += 1;
  return end;
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text.split("").every((one) => one === fence[0]);
}

function isTable(lines, at) {
  return lines[at].includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("|");
}

/** Whether a block begins in the middle of a paragraph. */
function begins(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  return (
    [FENCE, HEADING, RULE, QUOTE].some((one) => one.test(line)) ||
    (item && item[3] && (!/\d/.test(item[2]) || item[2].startsWith("1"))) ||
    isTable(lines, at)
  );
}

function endOfList(lines, at) {
  const ordered = /\d/.test(ITEM.exec(lines[at])[2]);
  const indent = ITEM.exec(lines[at])[1].length;
  let end = at + 1;
  for (let here = end; here < lines.length; here += 1) {
    const line = lines[here];
    if (!line.trim()) continue;
    const item = ITEM.exec(line);
    const inside = line.search(/\S/) > indent;
    const next = item && !RULE.test(line) && /\d/.test(item[2]) === ordered;
    const lazy = here === end && !begins(lines, here);
    if (!(inside || next || lazy)) break;
    end = here + 1;
  }
  return end;
}

function blockOf(lines, depth) {
  const line = lines[0];
  const fence = FENCE.exec(line);
  if (fence) return codeOf(lines, fence);
  const heading = HEADING.exec(line);
  // Below the page's own three levels.
  if (heading) return made(`h${Math.min(6, heading[1].length + 3)}`, "", ...inline(heading[2]));
  if (RULE.test(line)) return made("hr");
  if (depth < DEEPEST && QUOTE.test(line)) {
    return made("blockquote", "", ...nested(lines.map((one) => one.replace(QUOTE, "")), depth));
  }
  if (depth < DEEPEST && ITEM.test(line)) return listOf(lines, depth);
  if (isTable(lines, 0)) return tableOf(lines);
  return made("p", "", ...inline(lines.join("\n")));
}

function nested(lines, depth) {
  return split(lines).map((block) => blockOf(block, depth + 1));
}

function codeOf(lines, fence) {
  const closed = lines.length > 1 && closes(lines.at(-1), fence[1]);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const code = made("code", "", text);
  const pre = made("pre", "", code);
  pre.tabIndex = 0; // it scrolls
  const bar = made("div", "bar", made("span", "", fence[2]), copyButton(() => text, "Copy code"));
  return made("div", "code", bar, pre);
}

function listOf(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const list = made(/\d/.test(first[2]) ? "ol" : "ul");
  if (list.tagName === "OL") list.start = parseInt(first[2], 10);
  let own = [];
  let width = 0;
  const close = () => list.append(made("li", "", ...tight(nested(own, depth))));
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= first[1].length) {
      if (own.length) close();
      width = item[0].length;
      own = [line.slice(width)];
    } else {
      own.push(line.slice(Math.min(width, Math.max(0, line.search(/\S|$/)))));
    }
  }
  close();
  return list;
}

/** An item's text without a paragraph around it. */
function tight(nodes) {
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function tableOf(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/);
  const row = (line, tag) => made("tr", "", ...cells(line).map((one) => made(tag, "", ...inline(one.trim()))));
  const table = made(
    "table",
    "",
    made("thead", "", row(lines[0], "th")),
    made("tbody", "", ...lines.slice(2).map((line) => row(line, "td"))),
  );
  return made("div", "wide", table);
}

const INLINE = new RegExp(
  [
    String.raw`\\(?<escaped>[\\\x60*_{}[\]()#+.!~|<>-])`,
    String.raw`(?<ticks>\x60+)(?!\x60)(?<code>.+?)(?<!\x60)\k<ticks>(?!\x60)`,
    String.raw`!?\[(?<label>[^[\]\n]*)\]\((?<target>https?:\/\/[^\s()<>]+(?:\([^\s()<>]*\))?)\)`,
    String.raw`(?<bare>https?:\/\/[^\s<>"'\x60]*[^\s<>"'\x60.,;:!?)\]*])`,
    String.raw`(?<two>\*\*|(?<!\w)__|~~)(?=\S)(?<strong>.+?)(?<=\S)\k<two>`,
    String.raw`\*(?=[^\s*])(?<star>.+?)(?<=[^\s*])\*(?!\*)`,
    String.raw`(?<!\w)_(?=[^\s_])(?<line>.+?)(?<=[^\s_])_(?!\w)`,
  ].join("|"),
  "gs",
);

/** The nodes of a text with emphasis, code and links. */
function inline(text, depth = 0) {
  if (depth > DEEPEST || text.length > LONGEST) return [text];
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(at, found.index));
    at = found.index + found[0].length;
    const { escaped, code, label, target, bare, two, strong, star, line } = found.groups;
    if (escaped !== undefined) nodes.push(escaped);
    else if (code !== undefined) nodes.push(made("code", "", code));
    else if (target !== undefined) nodes.push(link(target, inline(label || target, depth + 1)));
    else if (bare !== undefined) nodes.push(link(bare, [bare]));
    else if (two !== undefined)
      nodes.push(made(two === "~~" ? "del" : "strong", "", ...inline(strong, depth + 1)));
    else nodes.push(made("em", "", ...inline(star ?? line, depth + 1)));
  }
  return [...nodes, text.slice(at)].filter((one) => one !== "");
}

function link(target, content) {
  const anchor = made("a", "", ...content);
  anchor.href = anchor.title = target;
  anchor.target = "_blank";
  anchor.rel = "noopener noreferrer";
  return anchor;
}

export function made(tag, kind, ...content) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.append(...content);
  return node;
}
