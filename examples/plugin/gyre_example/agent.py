"""The agent itself: asks the policy once for a shell script, and runs it. It runs in the sandbox, without gyre.

The gateway holds a call while cells switch roles, and may ask to come again: so it is patient, and it tries again.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

PATIENCE_S = 600.0
TRIES = 20


def ask(text: str) -> str:
    """The policy's answer. Exits with 3 when the request is refused, with 4 when nobody answers."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    for attempt in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)["choices"][0]["message"]["content"] or ""
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                print(error.read().decode("utf-8", "replace"), file=sys.stderr)
                sys.exit(3)
        except (OSError, ValueError):
            pass
        time.sleep(min(0.1 * 2**attempt, 30.0))
    sys.exit(4)


def script(text: str) -> str:
    """What stands between the first two fences, else everything."""
    fenced = text.split("```")
    return fenced[1].partition("\n")[2] if len(fenced) > 2 else text


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as stream:
        task = stream.read()
    answer = ask(f"{task}\nAnswer with one shell script that does this, between ``` fences.")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    subprocess.run(["/bin/sh", "-c", script(answer)], env=environment, check=False)
