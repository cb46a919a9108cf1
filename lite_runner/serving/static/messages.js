// The messages of a conversation. All text goes in as text nodes.
import { ApiError } from "./api.js";

/** A new message at the end of a list. */
export function message(list, role, name) {
  const made = new Message(role, name);
  list.append(made.element);
  made.element.scrollIntoView({ block: "end" });
  return made;
}

class Message {
  text = "";
  #node = document.createTextNode("");
  #figures = element("p", "figures");
  #began = performance.now();
  #first = null; // when the first token came
  #last = null;
  #tokens = 0;
  #usage = null;
  #reason = null;

  constructor(role, name) {
    this.element = element("li", role, element("h3", "", name), element("p", "text", this.#node));
    if (role === "assistant") {
      this.element.append(this.#figures);
      this.element.ariaBusy = "true";
    }
  }

  append(text) {
    this.text += text;
    this.#node.appendData(text);
  }

  /** A chunk of an answer. */
  take({ text, isToken, reason, usage }) {
    this.#reason = reason ?? this.#reason;
    this.#usage = usage ?? this.#usage;
    if (isToken) {
      this.#last = performance.now();
      this.#first ??= this.#last;
      this.#tokens += 1;
    }
    const list = this.element.parentElement;
    const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    this.append(text);
    this.#show([this.#rate()]);
    if (follows) list.scrollTop = list.scrollHeight;
  }

  fail(error) {
    this.element.append(faultOf(error));
    this.element.scrollIntoView({ block: "end" });
  }

  /** Nothing comes any more. */
  finish(stopped) {
    this.element.ariaBusy = "false";
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

function element(tag, kind, ...content) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.append(...content);
  return made;
}
