#!/usr/bin/env python3
"""Receives the tasks of a url handler and checks who sent them (Standard Webhooks).

    WEBHOOK_SECRETS=whsec_c2VjcmV0IGZvciB0aGUgZXhhbXBsZQ== python3 examples/receiver.py 9000
    curl localhost:8000/tasks -H 'Content-Type: application/json' -d '{"name": "notify", "payload": {"to": "ann"}}'

The server needs the same WEBHOOK_SECRETS. Without them nothing is checked.
"""
import base64, hashlib, hmac, json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRETS = [s for s in os.environ.get("WEBHOOK_SECRETS", "").split(",") if s]
KEYS = [base64.b64decode(s[6:]) if s.startswith("whsec_") else s.encode() for s in SECRETS]
done = {}  # answers by Idempotency-Key: a task may arrive more than once


def genuine(headers, body):
    stamp = headers.get("webhook-timestamp", "")
    if not stamp.isdigit() or abs(time.time() - int(stamp)) > 300:
        return False
    signed = f"{headers.get('webhook-id')}.{stamp}.".encode() + body
    wanted = [b"v1," + base64.b64encode(hmac.digest(key, signed, "sha256")) for key in KEYS]
    given = headers.get("webhook-signature", "").encode().split()
    return any(hmac.compare_digest(a, b) for a in wanted for b in given)


class Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if KEYS and not genuine(self.headers, body):
            return self.answer(401, {"error": "bad signature"})
        key = self.headers["Idempotency-Key"]
        if key not in done:  # the work itself
            done[key] = {"payload": json.loads(body), "sha256": hashlib.sha256(body).hexdigest()}
        self.answer(200, done[key])

    def answer(self, code, value):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 9000), Receiver)
print("listening on port", server.server_address[1], flush=True)
server.serve_forever()
