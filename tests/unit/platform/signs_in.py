"""What every small server does that stands for Airflow's API: it signs anybody in."""

from http.server import BaseHTTPRequestHandler


class SignsIn(BaseHTTPRequestHandler):
    """Answers each sign-in with a token, and logs nothing."""

    def do_POST(self) -> None:
        """Return a token."""
        self.send_response(201)
        self.end_headers()
        self.wfile.write(b'{"access_token": "any"}')

    def log_message(self, *_: object) -> None:
        """Say nothing."""
