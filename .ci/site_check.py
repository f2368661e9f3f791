"""Check every page of the built documentation in a browser, at the widths of a desktop and of a phone.

    mkdocs build --strict && python .ci/site_check.py site
    python .ci/site_check.py site --pages index methods --screenshots shots

A page fails if it scrolls sideways, if an element reaches beyond the window, if a picture or another file is
missing, if a script raises an error, or if a table breaks a line inside an identifier. At the width of a desktop,
code and tables must not scroll sideways either, except for the output of programs. ``--screenshots`` writes a
picture of each page at each width. Chromium or Chrome must be installed, and no other package. The browser opens
only pages on this machine.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (1280, 500)  # Chromium's windows are at least 500 pixels wide
HEIGHT = 900

# The script opens each page in a frame of each width, so that media queries apply, and reports errors.
LOOK = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body style="margin:0"><script>
const {pages, widths, height} = %s;
const shown = e => e.tagName.toLowerCase() + [...e.classList].map(c => '.' + c).join('') + ' "' +
  (e.alt || e.textContent || '').trim().replace(/\\s+/g, ' ').slice(0, 60) + '"';
function scrolls(element, root) {  // within an element that scrolls by itself, or that hides what is too wide
  for (let e = element.parentElement; e && e !== root; e = e.parentElement)
    if (getComputedStyle(e).overflowX !== 'visible') return true;
  return false;
}
function broken(code, document) {  // the words of a cell's code that stand on two lines
  const found = [], walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) for (const word of walker.currentNode.data.matchAll(/\\S+/g)) {
    const range = document.createRange();
    range.setStart(walker.currentNode, word.index);
    range.setEnd(walker.currentNode, word.index + word[0].length);
    const tops = [...range.getClientRects()].map(box => box.top);
    if (tops.length && Math.max(...tops) - Math.min(...tops) > 4) found.push(word[0]);
  }
  return found;
}
async function look(frame, page, width) {
  const errors = [], window_ = frame.contentWindow, document = frame.contentDocument, root = document.documentElement;
  for (const image of document.images) {
    image.loading = 'eager';
    if (!image.complete) await new Promise(done => image.onload = image.onerror = done);
    if (!image.naturalWidth) errors.push('a picture is missing: ' + image.getAttribute('src'));
  }
  await document.fonts.ready;
  if (root.scrollWidth > width) errors.push(`the page scrolls sideways: it is ${root.scrollWidth} px wide`);
  for (const e of document.querySelectorAll('body *')) {
    const box = e.getBoundingClientRect();
    if (box.width && box.height && box.right > width + 1 && box.left < width && !scrolls(e, root))
      errors.push(`reaches ${Math.round(box.right - width)} px beyond the window: ` + shown(e));
  }
  for (const code of document.querySelectorAll('td code, th code'))
    for (const word of broken(code, document)) errors.push('a table breaks a line within ' + word);
  const fitting = 'div:not(.language-text) > pre > code, .md-typeset__scrollwrap';
  if (width === widths[0]) for (const e of document.querySelectorAll(fitting))
    if (e.scrollWidth > e.clientWidth + 1)
      errors.push(`scrolls sideways by ${e.scrollWidth - e.clientWidth} px: ` + shown(e));
  return {page, width, height: root.scrollHeight, errors};
}
(async () => {
  for (const width of widths) for (const page of pages) {
    const frame = document.createElement('iframe');
    frame.style = `border:0;width:${width}px;height:${height}px`;
    const failed = [];
    frame.src = page;
    document.body.append(frame);
    frame.contentWindow.addEventListener('error', event => failed.push('a script failed: ' + event.message));
    await new Promise(done => frame.onload = done);
    const report = await look(frame, page, width);
    report.errors.push(...failed);
    await fetch('/report', {method: 'POST', body: JSON.stringify(report)});
    frame.remove();
  }
  await fetch('/report', {method: 'POST', body: 'null'});
})();
</script>"""


def browser() -> str | None:
    """Return the path of the first browser that is installed, or None."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


class Handler(SimpleHTTPRequestHandler):
    """Serve the site and the page that checks it, and receive its reports."""

    server: "Server"

    def do_GET(self) -> None:  # noqa: D102 - of the base class
        if self.path == "/look":
            kind, body = "text/html", self.server.look.encode()
        elif self.path.endswith("/search_index.json"):  # large, and read by every page
            kind, body = "application/json", b'{"config": {"lang": ["en"], "separator": " "}, "docs": []}'
        else:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:  # noqa: D102 - of the base class
        report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        if report is None:
            self.server.done.set()
        else:
            self.server.reports.append(report)

    def send_error(self, code: int, *args: Any) -> None:  # noqa: D102 - of the base class
        self.server.missing.append(f"{self.path} is missing, which {self.headers.get('Referer', 'no page')} asks for")
        super().send_error(code, *args)

    def log_message(self, *args: Any) -> None:  # noqa: D102 - of the base class
        pass


class Server(ThreadingHTTPServer):
    """A server of one site, with the reports on its pages."""

    def __init__(self, site: Path, look: str) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(site)))
        self.look, self.done = look, threading.Event()
        self.reports: list[dict[str, Any]] = []
        self.missing: list[str] = []


@contextmanager
def serving(site: Path, look: str) -> Iterator[Server]:
    """Serve a site on this machine."""
    with Server(site, look) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def command(path: str, profile: str, *options: str) -> list[str]:
    """Return a command that runs the browser headless, with its own profile and without access to other addresses."""
    fixed = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-extensions",
    ]
    only_here = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    return [path, *fixed, only_here, f"--user-data-dir={profile}", *options]


def check(site: Path, pages: Sequence[str], path: str, timeout: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the report of each page at each width, and the files that are missing.

    Raises:
        TimeoutError: If the browser is not done in time.
    """
    look = LOOK % json.dumps({"pages": list(pages), "widths": WIDTHS, "height": HEIGHT})
    with serving(site, look) as server, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        address = f"http://127.0.0.1:{server.server_port}/look"
        options = ("--remote-debugging-port=0", f"--window-size={max(WIDTHS)},{HEIGHT}", address)
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        run = subprocess.Popen(command(path, profile, *options), **silent)  # noqa: S603 - the browser that we found
        try:
            if not server.done.wait(timeout):
                last = server.reports[-1]["page"] if server.reports else "none"
                raise TimeoutError(f"{path} was not done after {timeout:g} s; the last page was {last}")
        finally:
            run.terminate()
            run.wait()
        return server.reports, server.missing


def take_screenshots(site: Path, reports: Sequence[dict[str, Any]], path: str, folder: Path) -> None:
    """Write a picture of each page at each width, at its full height."""
    folder.mkdir(parents=True, exist_ok=True)
    with serving(site, "") as server, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for report in reports:
            name = f"{report['page'].removesuffix('.html').replace('/', '_')}_{report['width']}.png"
            size = f"--window-size={report['width']},{min(report['height'], 12000)}"
            address = f"http://127.0.0.1:{server.server_port}/{report['page']}"
            options = (size, f"--screenshot={folder / name}", "--virtual-time-budget=3000", address)
            taken = command(path, profile, *options)
            subprocess.run(taken, check=True, capture_output=True, timeout=120)  # noqa: S603 - the browser that we found


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a site, and return 1 if a page fails, or 2 if no browser is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder that mkdocs built")
    parser.add_argument("--pages", nargs="+", help="such as index or api/algorithms; all by default")
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER", help="write a picture of each page at each width")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for all pages")
    given = parser.parse_args(arguments)
    path = browser()
    if path is None:
        print(f"no browser: install one of {', '.join(BROWSERS)}", file=sys.stderr)
        return 2
    pages = sorted(p.relative_to(given.site).as_posix() for p in given.site.rglob("*.html") if p.name != "404.html")
    if given.pages:
        pages = [page for page in pages if page.removesuffix(".html") in given.pages]
    reports, missing = check(given.site, pages, path, given.timeout)
    if given.screenshots:
        take_screenshots(given.site, reports, path, given.screenshots)
    faults = [f"{r['page']} at {r['width']} px: {error}" for r in reports for error in r["errors"]] + missing
    print("\n".join([*faults, f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} px: {len(faults)} faults"]))
    return 1 if faults or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
