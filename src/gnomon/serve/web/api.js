// Talking to the server: the key, JSON requests, and server-sent events.

export class ServerError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export const key = {
  get: () => sessionStorage.getItem("key") ?? "",
  set: (value) => (value ? sessionStorage.setItem("key", value) : sessionStorage.removeItem("key")),
};

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const text = await response.text();
  let message = text.slice(0, 500) || response.statusText;
  try { message = JSON.parse(text).error?.message ?? message; } catch { /* not JSON: shown as it is */ }
  throw new ServerError(response.status, message);
}

export const getJSON = async (path) => (await ask(path)).json();

/** Yields the JSON values of a stream until `[DONE]` or its end. */
export async function* events(path, { body, signal } = {}) {
  const response = await ask(path, {
    method: body ? "POST" : "GET",
    headers: body ? { "content-type": "application/json" } : {},
    body: body && JSON.stringify(body),
    signal,
  });
  const warning = response.headers.get("warning");
  if (warning) yield { warning };
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      let end;
      while ((end = held.indexOf("\n\n")) >= 0) {
        const data = held.slice(0, end).split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        held = held.slice(end + 2);
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
