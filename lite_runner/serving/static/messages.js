// The messages of a conversation. All text goes in as text nodes.
import { ApiError } from "./api.js";
import { Markdown, copyButton, made as element } from "./markdown.js";

/** A new message at the end of a list; `formatted`: its text is Markdown. */
export function message(list, role, name, formatted) {
  const made = new Message(role, name, formatted);
  list.append(made.element);
  made.element.scrollIntoView({ block: "end" });
  return made;
}

class Message {
  text = "";
  #node = document.createTextNode(""); // of text that is not formatted
  #markdown = null;
  #thoughts = null; // the text of what is thought before the answer
  #frame = null; // the next drawing of what is formatted
  #figures = element("p", "figures");
  #began = performance.now();
  #first = null; // when the first token came
  #last = null;
  #tokens = 0;
  #usage = null;
  #reason = null;

  constructor(role, name, formatted) {
    if (formatted) this.#markdown = new Markdown();
    const body = this.#markdown?.element ?? element("p", "text", this.#node);
    this.element = element("li", role, element("h3", "", name), body);
    if (role === "assistant") {
      this.element.append(this.#figures);
      this.element.ariaBusy = "true";
    }
  }

  append(text) {
    this.text += text;
    if (this.#markdown) this.#frame ??= requestAnimationFrame(() => this.#draw());
    else this.#node.appendData(text);
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    const list = this.element.parentElement;
    const follows = list && isAtEnd(list);
    this.#markdown.show(this.text);
    if (follows) list.scrollTop = list.scrollHeight;
  }

  /** A chunk of an answer. */
  take({ text, thinking, isToken, reason, usage }) {
    this.#reason = reason ?? this.#reason;
    this.#usage = usage ?? this.#usage;
    if (isToken) {
      this.#last = performance.now();
      this.#first ??= this.#last;
      this.#tokens += 1;
    }
    const list = this.element.parentElement;
    const follows = isAtEnd(list);
    if (thinking) this.#think(thinking);
    this.append(text);
    this.#show([this.#rate()]);
    if (follows) list.scrollTop = list.scrollHeight;
  }

  #think(text) {
    if (!this.#thoughts) {
      this.#thoughts = document.createTextNode("");
      const body = element("p", "text", this.#thoughts);
      const summary = element("summary", "", "Thinking");
      this.element.firstChild.after(element("details", "", summary, body));
    }
    this.#thoughts.appendData(text);
  }

  fail(error) {
    this.element.append(faultOf(error));
    this.element.scrollIntoView({ block: "end" });
  }

  /** Nothing comes any more. */
  finish(stopped) {
    this.element.ariaBusy = "false";
    if (this.#markdown) this.#draw();
    if (this.text) this.element.firstChild.after(copyButton(() => this.text, "Copy answer"));
    if (this.#first === null) {
      this.#show([stopped && "stopped"]);
      return;
    }
    const usage = this.#usage;
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    this.#show([
      `${usage?.completion_tokens ?? this.#tokens} tokens`,
      this.#rate(),
      `first token after ${seconds(this.#first - this.#began)}`,
      usage && `prompt ${usage.prompt_tokens} tokens${cached ? `, ${cached} cached` : ""}`,
      stopped ? "stopped" : this.#reason === "length" && "cut off by the token limit",
    ]);
  }

  #rate() {
    const took = this.#last - this.#first;
    return took > 0 && `${(((this.#tokens - 1) * 1000) / took).toFixed(1)} tokens/s`;
  }

  #show(figures) {
    this.#figures.textContent = figures.filter(Boolean).join(" · ");
  }
}

function isAtEnd(list) {
  return list.scrollHeight - list.scrollTop - list.clientHeight < 40;
}

function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

/** The whole of what the server has said. */
export function faultOf(error) {
  const found = element("p", "fault", error.message);
  found.role = "alert";
  if (error instanceof ApiError) {
    const known = Object.entries(error.details).filter(([, value]) => value);
    found.append("\n", element("small", "", known.map((pair) => pair.join(" ")).join(" · ")));
  } else if (error instanceof TypeError) {
    found.append("\nThe server cannot be reached; has it ended?");
  }
  return found;
}
