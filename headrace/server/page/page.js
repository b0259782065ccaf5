// The page's two halves, a chat and the figures. All text goes into the page as text, never as markup.

const at = (id) => document.getElementById(id);

// The key, if the server wants one.

const KEY = "headrace-key";
let asking = null;

/** Ask for a key; all who ask while the question is open wait for the one answer. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    at("key").value = "";
    at("refused").hidden = !sessionStorage.getItem(KEY);
    at("ask").showModal();
    at("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, at("key").value.trim());
      at("ask").close();
      asking = null;
      resolve();
    };
  });
  return asking;
}

/** fetch with the key; asks for one, or for another one, until the server is content. */
async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const guarded = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch(path, { ...options, headers: { ...options.headers, ...guarded } });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(KEY) === key) await askForKey(); // else there is a new one by now
  }
}

at("ask").addEventListener("cancel", (event) => event.preventDefault()); // without a key there is nothing

// The chat.

const messages = [];
let running = null; // what aborts the answer under way

/** The events of a stream of server-sent events, parsed. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function element(name, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

/** Show text, with what stands between fences as code. */
function show(target, text) {
  const parts = text.split(/^```[\w+#.-]*[ \t]*\n?/m);
  target.replaceChildren(
    ...parts.map((part, index) => (index % 2 ? element("pre", {}, element("code", {}, part)) : part)),
  );
}

function article(role, title, ...children) {
  at("empty").hidden = true;
  at("log").append(element("article", { className: role }, element("h2", {}, title), ...children));
}

/** The place of an answer in the log, to be filled as it comes. */
function place() {
  const text = element("div", { className: "text" });
  const thoughts = element("div", { className: "text" });
  const summary = element("summary", {}, "Thinking …");
  const details = element("details", { hidden: true }, summary, thoughts);
  const facts = element("p", { className: "facts", hidden: true });
  article("assistant", "Model", details, text, facts);
  return { text, thoughts, summary, details, facts };
}

/** Keep the end in sight for those who have not scrolled away from it. */
function following(change) {
  const log = at("log");
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (near) log.scrollTop = log.scrollHeight;
}

function tell(error) {
  at("error").textContent = error;
  at("error").hidden = !error;
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

/** Read one answer into `said` and into its bubble, as it comes. */
async function read(body, said, shown, timing) {
  for await (const event of events(body)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) timing.usage = event.usage;
    const delta = event.choices[0]?.delta;
    if (!delta?.content && !delta?.reasoning) continue;
    timing.first ??= performance.now();
    following(() => {
      if (delta.reasoning) {
        said.reasoning = (said.reasoning ?? "") + delta.reasoning;
        shown.details.hidden = false;
        shown.thoughts.textContent = said.reasoning;
      }
      if (delta.content) {
        said.content += delta.content;
        shown.summary.textContent = "Thoughts";
        show(shown.text, said.content);
      }
    });
  }
}

function describe({ start, first, usage }, stopped) {
  const facts = stopped ? ["stopped"] : [];
  if (usage) {
    facts.push(`${usage.completion_tokens} tokens`);
    facts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} from cache`);
  }
  if (first) {
    facts.push(`first after ${seconds((first - start) / 1000)}`);
    const rest = (performance.now() - first) / 1000;
    if (usage?.completion_tokens > 1 && rest > 0) {
      facts.push(`${((usage.completion_tokens - 1) / rest).toFixed(1)} tokens/s`);
    }
  }
  return facts.join(" · ");
}

async function answer() {
  const said = { role: "assistant", content: "" };
  const shown = place();
  const timing = { start: performance.now() };
  const mine = (running = new AbortController());
  busy(true);
  try {
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ messages, stream: true, stream_options: { include_usage: true } }),
      signal: mine.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    await read(response.body, said, shown, timing);
  } catch (error) {
    if (!mine.signal.aborted) tell(error.message);
  }
  if (running !== mine) return; // another chat has begun meanwhile
  running = null;
  following(() => {
    shown.summary.textContent = "Thoughts";
    shown.facts.textContent = describe(timing, mine.signal.aborted);
    shown.facts.hidden = !shown.facts.textContent;
  });
  if (said.content || said.reasoning) messages.push(said);
  else messages.pop(); // the question, which may be asked again
  busy(false);
}

function busy(is) {
  at("send").disabled = is;
  at("stop").hidden = !is;
  at("log").setAttribute("aria-busy", String(is));
  if (!is) at("prompt").focus();
}

function send() {
  const text = at("prompt").value.trim();
  if (!text || running) return;
  tell("");
  at("prompt").value = "";
  messages.push({ role: "user", content: text });
  article("user", "You", element("div", { className: "text" }, text));
  at("log").scrollTop = at("log").scrollHeight;
  answer();
}

at("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", () => {
  running?.abort();
  running = null;
  messages.length = 0;
  tell("");
  at("log").querySelectorAll("article").forEach((each) => each.remove());
  at("empty").hidden = false;
  busy(false);
});

// The figures.

const EVERY = 2000; // milliseconds between two looks
const WINDOW = 60000; // over which rates are taken
const looks = []; // of the last minute: { time, sums }

/** Every figure, summed over its labels, by its name without the prefix. */
function parse(text) {
  const sums = {};
  for (const [, name, value] of text.matchAll(/^headrace:(\w+)(?:\{.*\})? (\S+)$/gm)) {
    sums[name] = (sums[name] ?? 0) + Number(value);
  }
  return sums;
}

function seconds(value) {
  return value < 1 ? `${(value * 1000).toPrecision(3)} ms` : `${value.toFixed(1)} s`;
}

const percent = (value) => `${(value * 100).toFixed(0)} %`;
const count = (value) => String(value ?? 0);

/** By how much a sum has grown within the window. */
function growth(name) {
  return (looks.at(-1).sums[name] ?? 0) - (looks[0].sums[name] ?? 0);
}

/** Growth of one sum for each unit of another, or a dash where that has not grown. */
function ratio(above, below, form) {
  const divisor = growth(below);
  return divisor > 0 ? form(growth(above) / divisor) : "–";
}

/** Tokens a second between each two looks. */
function rates() {
  const name = "generation_tokens_total";
  return looks.slice(1).map((look, index) => {
    const before = looks[index];
    return ((look.sums[name] - before.sums[name]) * 1000) / (look.time - before.time);
  });
}

function draw(values) {
  const most = Math.max(1, ...values);
  const step = 240 / (WINDOW / EVERY);
  const points = values.map((value, index) => {
    const x = 240 - (values.length - 1 - index) * step;
    return `${x.toFixed(1)},${(46 - (44 * value) / most).toFixed(1)}`;
  });
  at("curve").setAttribute("points", points.join(" "));
}

function figures(sums) {
  return {
    running: count(sums.num_requests_running),
    waiting: count(sums.num_requests_waiting),
    kv: percent(sums.kv_cache_usage_perc),
    rate: rates().length ? rates().at(-1).toFixed(1) : "–",
    first: ratio("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count", seconds),
    between: ratio("inter_token_latency_seconds_sum", "inter_token_latency_seconds_count", seconds),
    cached: ratio("prefix_cache_hits_total", "prefix_cache_queries_total", percent),
    rows: ratio("decode_rows_per_step_sum", "decode_rows_per_step_count", (value) => value.toFixed(1)),
    answers: count(sums.request_success_total),
    errors: count(sums.request_errors_total),
    left: count(sums.request_cancellations_total),
    preemptions: count(sums.num_preemptions_total),
  };
}

/** Whether the server has begun to count anew: what it tells is no growth of what it told before. */
function anew(before, sums) {
  return Object.keys(sums).some((name) => name.endsWith("_total") && sums[name] < before[name]);
}

async function look() {
  const response = await request("metrics");
  if (!response.ok) throw new Error();
  const sums = parse(await response.text());
  const time = performance.now();
  if (looks.length && anew(looks.at(-1).sums, sums)) looks.length = 0;
  looks.push({ time, sums });
  while (looks[0].time < time - WINDOW) looks.shift();
  for (const [id, text] of Object.entries(figures(sums))) at(id).textContent = text;
  draw(rates());
  at("all").hidden = Boolean(sessionStorage.getItem(KEY)); // a link cannot carry a key
  state(sums.engine_ready ? "ready" : "not ready", sums.engine_ready);
}

function state(words, good) {
  if (at("status").textContent === words) return; // a status that is written again is read out again
  at("status").textContent = words;
  at("status").className = good ? "good" : "bad";
}

async function watch() {
  try {
    if (!document.hidden) await look();
  } catch {
    state("no answer", false);
  }
  setTimeout(watch, EVERY);
}

async function start() {
  watch();
  try {
    const response = await request("v1/models");
    at("model").textContent = (await response.json()).data[0].id;
  } catch {
    at("model").textContent = "";
  }
}

start();
at("prompt").focus();
