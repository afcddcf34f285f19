"""What tests measured is shown at the end of the output, also when worker processes ran them."""


def pytest_terminal_summary(terminalreporter):
    reports = [report for found in terminalreporter.stats.values() for report in found]
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {value}"
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "measured"
    ]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
