"""Write the screen of `mpbroker ctl top`: the load of a broker as lines of text."""

from __future__ import annotations

from mpbroker.cli.ctl.ctl_text import size
from mpbroker.inspect.load import Page


def render(page: Page, title: str, height: int) -> list[str]:
    """Return at most ``height`` lines of text about a broker's load.

    The most important lines come first.
    """
    lines = [
        title,
        f"{page.requests:,.0f} requests/s   in {size(page.in_rate)}/s   out"
        f" {size(page.out_rate)}/s   {page.connections:,} connections   queue"
        f" {page.queue} of {page.queue_limit}   {page.parked} parked  "
        f" {page.spare_cores:.1f} cores idle",
        f"Bottleneck: {page.verdict}",
    ]
    if page.advice:
        lines.append(f"Suggestion: {page.advice}")
    lines += ["", f"{'PROCESS':<16}{'PID':>8}{'CPU':>7}{'BUSY':>7}{'REQ/S':>10}  NOW"]
    for each in page.processes:
        name = f"{each.role} {each.id}"
        lines.append(
            f"{name:<16}{each.pid:>8}{each.cpu:>7.0%}{_share(each.busy):>7}"
            f"{'-' if each.rate is None else f'{each.rate:,.0f}':>10}  "
            f"{'' if each.state == 'READY' else each.state + ' '}{each.note}".rstrip()
        )
    left = height - len(lines)
    if page.apis and left > 3:
        lines += ["", f"{'API':<28}{'REQ/S':>10}{'MEAN':>11}{'OF ALL':>8}"]
        for api in page.apis[: max(1, left // 2 - 2)]:
            lines.append(
                f"{api.name:<28}{api.rate:>10,.0f}{f'{api.mean_ms:,.3f} ms':>11}"
                f"{api.share:>8.0%}"
            )
    left = height - len(lines)
    if page.clients and left > 3:
        lines += ["", f"{'CLIENT':<28}{'CONNS':>8}{'IN/S':>12}{'OUT/S':>12}"]
        for client in page.clients[: left - 2]:
            lines.append(
                f"{client.address:<28}{client.connections:>8,}"
                f"{size(client.in_rate):>12}{size(client.out_rate):>12}"
            )
    return lines[:height]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
