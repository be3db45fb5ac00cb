// The console's own script: copies commands, draws the chart of a run, and keeps it and the heat map up to date.
// It makes no HTML of texts: what it inserts as HTML comes from the server, which has escaped it.
"use strict";

// htmx runs no text as code, loads nothing from other hosts, and adds no style of its own. It reads this when it starts.
Object.assign(htmx.config, {
  allowEval: false, allowScriptTags: false, selfRequestsOnly: true, includeIndicatorStyles: false, historyEnabled: false,
});

// Browsers open six connections to a server. So a page that nobody sees gives its stream back, and opens another one when
// it is seen again, which begins with what has changed meanwhile.
htmx.createEventSource = (url) => {
  const listeners = [];
  let real = null, over = false;
  const source = {
    onopen: null, onerror: null,
    get readyState() { return real ? real.readyState : over ? EventSource.CLOSED : EventSource.OPEN; },
    addEventListener(type, listener) {
      listeners.push([type, listener]);
      if (real) real.addEventListener(type, listener);
    },
    removeEventListener(type, listener) {
      const at = listeners.findIndex((item) => item[0] === type && item[1] === listener);
      if (at >= 0) listeners.splice(at, 1);
      if (real) real.removeEventListener(type, listener);
    },
    close() { over = true; leave(); },
  };
  function leave() {
    if (real) real.close();
    real = null;
  }
  function enter() {
    real = new EventSource(url, { withCredentials: true });
    real.onopen = (event) => { if (source.onopen) source.onopen(event); };
    real.onerror = (event) => {
      over = over || real.readyState === EventSource.CLOSED; // then htmx makes another source
      if (source.onerror) source.onerror(event);
    };
    listeners.forEach(([type, listener]) => real.addEventListener(type, listener));
  }
  document.addEventListener("visibilitychange", () => {
    if (over) return;
    leave();
    if (!document.hidden) enter();
  });
  if (!document.hidden) enter();
  return source;
};

(() => {
  const MOST_LIVE_COLUMNS = 60; // of a heat map; with more of them the whole map is loaded again

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const text = button.previousElementSibling.textContent;
    const done = () => {
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    };
    const select = () => getSelection().selectAllChildren(button.previousElementSibling);
    navigator.clipboard ? navigator.clipboard.writeText(text).then(done, select) : select();
  });

  // What a reader has unfolded stays unfolded when its part of the page is replaced.
  const unfolded = new Set();
  document.addEventListener("toggle", (event) => {
    if (event.target.id && event.target.isConnected) unfolded[event.target.open ? "add" : "delete"](event.target.id);
  }, true);
  document.addEventListener("htmx:sseMessage", (event) => {
    event.target.querySelectorAll("details[id]").forEach((item) => { item.open = unfolded.has(item.id); });
  });

  // While the console itself does not answer, the page says so. Its stream is opened again without end.
  document.addEventListener("htmx:sseError", () => document.body.classList.add("lost"));
  document.addEventListener("htmx:sseOpen", () => document.body.classList.remove("lost"));

  const host = document.getElementById("chart");
  if (host) start(host);

  function start(host) {
    let chart = null, data = null, zoomed = false, loading = false, looks = 3;

    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const tail = () => JSON.parse(document.querySelector("#tail [data-tail]").dataset.tail);

    function columns(document_) {
      return [document_.rounds, ...document_.values, document_.mean, document_.worst];
    }

    async function load(from, to) {
      if (loading) return;
      loading = true;
      try {
        const range = from === undefined ? "" : `?from=${from}&to=${to}`;
        const answer = await fetch(host.dataset.series + range, { headers: { Accept: "application/json" } });
        if (!answer.ok) return;
        const loaded = await answer.json();
        zoomed = from !== undefined;
        if (!zoomed) data = loaded;
        draw(loaded);
      } finally {
        loading = false;
      }
    }

    // Marks on the axis of rounds stand at whole numbers only.
    const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

    function draw(loaded) {
      const known = [...loaded.values, loaded.mean, loaded.worst].some((line) => line.some((value) => value !== null));
      document.getElementById("chart-absent").hidden = known;
      document.getElementById("chart-figure").hidden = !known;
      const share = tail().share;
      const write = (value) => value == null ? "–" : share ? `${(100 * value).toFixed(1)} %` : value.toPrecision(4);
      const axis = { stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false },
        font: "12px system-ui, sans-serif" };
      const thin = { width: 1, stroke: colour("--soft"), alpha: 0.45, points: { show: false }, spanGaps: true };
      const bold = (name) => ({ width: 2.5, stroke: colour(name), points: { show: loaded.rounds.length < 3 }, spanGaps: true });
      const told = document.getElementById("chart-told");
      const names = [...loaded.names, "mean", "worst"];
      const show = (u) => {
        const at = u.cursor.idx, line = u.series.findIndex((item, i) => i > 0 && item._focus);
        if (at == null) { told.textContent = ""; return; }
        const i = line > 0 ? line : names.length - 1;
        told.textContent = `round ${u.data[0][at]}: ${names[i - 1]} ${write(u.data[i][at])}`;
      };
      const options = {
        width: host.clientWidth, height: 300, legend: { show: false }, focus: { alpha: 0.5 },
        cursor: { focus: { prox: 20 }, drag: { x: true, y: false, setScale: false }, points: { show: false } },
        scales: { x: { time: false, range: (u, low, high) => low === high ? [low - 1, high + 1] : [low, high] }, y: share ? { range: (u, low, high) => [Math.max(0, low - 0.05), Math.min(1, high + 0.05)] } : {} },
        axes: [{ ...axis, size: 34, incrs: WHOLE, values: (u, marks) => { host.dataset.marks = marks.join(" "); return marks; } }, { ...axis, size: 56, values: (u, ticks) => ticks.map((tick) => share ? `${Math.round(100 * tick)} %` : tick) }],
        series: [{}, ...loaded.names.map(() => thin), bold("--c0"), bold("--c1")],
        hooks: {
          setCursor: [show],
          setSeries: [show],
          setSelect: [(u) => {
            if (u.select.width < 8) return;
            const at = (x) => Math.round(u.posToVal(x, "x"));
            load(Math.max(0, at(u.select.left)), at(u.select.left + u.select.width) + 1);
            u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          }],
        },
      };
      if (chart) chart.destroy();
      host.querySelectorAll(".uplot").forEach((old) => old.remove());
      chart = loaded.rounds.length && known ? new uPlot(options, columns(loaded), host) : null;
      host.dataset.points = String(loaded.rounds.length);
    }

    // A new round changes the last point of each line; anything else is loaded again.
    function follow() {
      const now = tail();
      if (now.first === undefined) return;
      setTimeout(shade, 0, now);
      const fits = data && now.together === data.together && now.values.length === data.names.length
        && now.first <= data.rounds.length && now.first >= data.rounds.length - 1;
      if (!fits) { load(); return; }
      data.rounds[now.first] = now.rounds[0];
      data.mean[now.first] = now.mean[0];
      data.worst[now.first] = now.worst[0];
      data.values.forEach((line, i) => { line[now.first] = now.values[i][0]; });
      if (zoomed) return;
      if (!chart) { draw(data); return; }
      chart.setData(columns(data));
      host.dataset.points = String(data.rounds.length);
    }

    // The last column of the heat map lies over what the map shows there.
    function shade(now) {
      const map = document.querySelector("#heat-figure .plot > svg");
      if (now.column === undefined) return;
      if (!map) {  // there was no round when the page was made, or the run's privacy hides the numbers
        if (looks > 0) { looks -= 1; reload(); }
        return;
      }
      const known = Number(map.dataset.column ?? now.column);
      const live = map.querySelectorAll("g.live");
      if (now.column > known + 1 || live.length > MOST_LIVE_COLUMNS) { reload(); return; }
      map.dataset.column = String(now.column);
      let column = map.querySelector(`g.live[data-column="${now.column}"]`);
      if (!column) {
        column = document.createElementNS("http://www.w3.org/2000/svg", "g");
        column.setAttribute("class", "live");
        column.dataset.column = String(now.column);
        map.append(column);
      }
      if (column.dataset.shades !== now.shades) {
        column.innerHTML = now.shades;
        column.dataset.shades = now.shades;
      }
    }

    async function reload() {
      const answer = await fetch(location.href);
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("heat-figure");
      if (fresh) document.getElementById("heat-figure").replaceWith(fresh);
    }

    document.addEventListener("htmx:sseMessage", (event) => { if (event.target.id === "tail") setTimeout(follow); });
    host.addEventListener("dblclick", () => { zoomed = false; load(); });
    new ResizeObserver(() => { if (chart) chart.setSize({ width: host.clientWidth, height: 300 }); }).observe(host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (data && !zoomed) draw(data); });
    load();
  }
})();
