"""A stand-in for the engine of `onbeat chat`: it answers with the name of the model and the last message.

`STAND_IN_FAILS` in the environment: it writes a line and ends. `STAND_IN_HANGS`: it is never ready.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ORDER = json.loads(Path(sys.argv[1]).read_text())


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(200, ORDER["instance_id"].encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["messages"][-1]["content"] == "die":
            os._exit(3)
        content = f"{body['model']} heard {len(body['messages'])}: {body['messages'][-1]['content']}"
        self.reply(200, json.dumps({"choices": [{"message": {"content": content}}]}).encode())

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if "STAND_IN_FAILS" in os.environ:
    sys.exit("no weights in this model")
if "STAND_IN_HANGS" in os.environ:
    time.sleep(300)
HTTPServer(("127.0.0.1", ORDER["port"]), Handler).serve_forever()
