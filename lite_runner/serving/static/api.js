// The server's endpoints, by paths relative to the page: it may be below a path of a proxy.

/** An answer other than 200, or an error within a stream. */
export class ApiError extends Error {
  constructor(status, error, id) {
    super(error.message);
    this.name = "ApiError";
    this.status = status; // null: within a stream
    this.details = { status, type: error.type, param: error.param, code: error.code, request: id };
  }
}

export class Api {
  key = "";

  /** Cards of the base model and its adapters. */
  async models() {
    return (await this.#json("v1/models")).data;
  }

  async version() {
    return (await this.#json("version")).version;
  }

  /** Why the model cannot chat; null: it can. */
  async chatFault() {
    try {
      await this.#json("tokenize", { messages: [{ role: "user", content: "hello" }] });
      return null;
    } catch (error) {
      if (error.status === 400) return error.message;
      throw error;
    }
  }

  /** {text, thinking, isToken, reason, usage} of each chunk of an answer. */
  async *stream(chats, body, signal) {
    const path = chats ? "v1/chat/completions" : "v1/completions";
    const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await this.#fetch(path, streamed, signal);
    const id = response.headers.get("X-Request-Id");
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(null, chunk.error, id);
      const choice = chunk.choices[0];
      yield {
        text: choice?.delta?.content ?? choice?.text ?? "",
        thinking: choice?.delta?.reasoning ?? "",
        isToken: Boolean(choice && !choice.finish_reason && !choice.delta?.role),
        reason: choice?.finish_reason ?? null,
        usage: chunk.usage ?? null,
      };
    }
    throw new Error("The connection ended before the answer did.");
  }

  async #json(path, body) {
    return (await this.#fetch(path, body)).json();
  }

  async #fetch(path, body, signal) {
    const headers = {};
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    if (body) headers["Content-Type"] = "application/json";
    const method = body ? "POST" : "GET";
    const response = await fetch(path, { method, headers, body: JSON.stringify(body), signal });
    if (response.ok) return response;
    throw await refusal(response);
  }
}

async function refusal(response) {
  const id = response.headers.get("X-Request-Id");
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new ApiError(response.status, error, id);
  } catch {
    return new ApiError(response.status, { message: text || response.statusText }, id); // a proxy's
  }
}

/** The data of server-sent events. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice("data: ".length);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed, which has been told
  }
}
