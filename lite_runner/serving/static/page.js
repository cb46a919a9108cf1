// A conversation with the server that this page is of. Nothing of a model or of the server becomes
// HTML: it is put in as text, the Markdown of an answer as elements that hold text. The key is in this module's memory alone.
import { Api } from "./api.js";
import { faultOf, message } from "./messages.js";

const $ = (id) => document.getElementById(id);
const api = new Api();
const settings = $("settings");
const turns = []; // {user, assistant}: what has been answered, be it in part
let chats = true; // false: the model has no chat template, and text is continued
let running = null; // an AbortController while an answer comes

// -- Start: models, and whether they chat. ---------------------------------------------------------

async function start() {
  let models;
  try {
    models = await api.models();
    $("version").textContent = await api.version();
    await findMode();
  } catch (error) {
    $("faults").replaceChildren(faultOf(error));
    if (error.status === 401) askForKey();
    return;
  }
  $("faults").replaceChildren();
  $("access").hidden = true;
  $("model").replaceChildren(...models.map((one) => new Option(label(one), one.id)));
  $("model").disabled = $("send").disabled = false;
  $("context").textContent = `A conversation has at most ${models[0].max_model_len} tokens.`;
  $("message").focus();
}

function label(card) {
  return card.parent ? `${card.id} (adapter)` : card.id;
}

async function findMode() {
  const missing = await api.chatFault();
  chats = missing === null;
  $("mode").hidden = chats;
  $("system-field").hidden = !chats;
  if (!chats) {
    $("mode").textContent =
      `No chat with this model: ${missing}. Text is continued instead (/v1/completions), each ` +
      "message after all that stands before it; an answer has 256 tokens unless you say otherwise.";
  }
}

function askForKey() {
  $("access").hidden = false;
  $("key").focus();
}

$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  api.key = $("key").value;
  $("key").value = "";
  start();
});

// -- Sending and stopping. -------------------------------------------------------------------------

/** The body of a request, but for what is asked. */
function options() {
  const body = { model: $("model").value };
  for (const field of settings.elements) {
    if (field.type === "number" && field.value !== "") body[field.name] = field.valueAsNumber;
  }
  const stop = settings.elements.stop.value.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  return body;
}

/** What is asked: the turns so far, and `text`. */
function asked(text) {
  if (!chats) {
    const before = turns.flatMap((turn) => [turn.user, turn.assistant, "\n"]);
    return { prompt: [...before, text].join("") };
  }
  const messages = turns.flatMap((turn) => [
    { role: "user", content: turn.user },
    { role: "assistant", content: turn.assistant },
  ]);
  const system = settings.elements.system.value;
  if (system) messages.unshift({ role: "system", content: system });
  return { messages: [...messages, { role: "user", content: text }] };
}

async function send() {
  const text = $("message").value;
  if (running || $("send").disabled || !text.trim()) return;
  if (!settings.checkValidity()) {
    $("panel").open = true;
    settings.reportValidity();
    return;
  }
  running = new AbortController();
  const body = { ...(chats ? {} : { max_tokens: 256 }), ...options(), ...asked(text) };
  message($("conversation"), "user", "You").append(text);
  const answer = message($("conversation"), "assistant", body.model, chats);
  $("message").value = "";
  busy(true);
  try {
    for await (const chunk of api.stream(chats, body, running.signal)) answer.take(chunk);
    announce(`${body.model}: ${answer.text}`);
  } catch (error) {
    if (error.name === "AbortError") announce("Stopped.");
    else answer.fail(error);
    if (error.status === 401) askForKey();
  }
  answer.finish(running.signal.aborted);
  if (answer.text) turns.push({ user: text, assistant: answer.text });
  else if (!$("message").value) $("message").value = text; // to be sent again
  running = null;
  busy(false);
}

function busy(is) {
  const focused = document.activeElement;
  $("stop").hidden = !is;
  $("send").hidden = $("clear").disabled = is;
  if (is) announce("Generating.");
  // A control that goes away takes the focus along.
  if (focused === $("stop") || focused === $("send")) $(is ? "stop" : "message").focus();
}

function announce(text) {
  $("status").textContent = text;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("message").addEventListener("keydown", (event) => {
  // Not the Enter that chooses a candidate of an input method.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  turns.length = 0;
  $("conversation").replaceChildren();
  announce("New conversation.");
  $("message").focus();
});
settings.addEventListener("submit", (event) => event.preventDefault());

// -- Looks. ----------------------------------------------------------------------------------------

$("theme").addEventListener("change", () => {
  document.documentElement.dataset.theme = $("theme").value;
});
$("panel").open = matchMedia("(width >= 60rem)").matches;
start();
