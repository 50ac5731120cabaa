"""Real HTTP servers on this machine that answer as they are told."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serve(answer):
    """Serve on a free port; yields the address.

    Args:
        answer: From the path, the headers and the JSON of a request to the status, the answer (JSON, or text as it
            is) and, if there are any, further headers.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            status, said, *headers = answer(self.path, self.headers, json.loads(body or "null"))
            data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            try:
                self.send_response(status)
                for name, value in ({"Content-Type": "application/json"} | dict(*headers)).items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # the client did not wait
                self.close_connection = True

        do_GET = do_POST

        def log_message(self, *_):
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

    with Quiet(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()
