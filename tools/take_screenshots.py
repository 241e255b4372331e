"""Take the pictures of the live page that docs/clients.md shows, of a cluster that runs and has a load.

    tandem serve --prefill 2 --decode 2 --detach
    tandem bench run --url http://127.0.0.1:8000 --num-requests 400 --concurrency 6 &
    python tools/take_screenshots.py http://127.0.0.1:8000 docs/figures

It needs Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 60.0
#: name → width, height, whether dark
PICTURES = {"page-light": (1280, 1400, False), "page-dark": (1280, 1400, True), "page-phone": (420, 1500, False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of the cluster")
    parser.add_argument("directory", type=Path, help="where the pictures go")
    options = parser.parse_args()
    driver = shutil.which("chromedriver")
    if driver is None:
        parser.error("there is no chromedriver: apt-get install chromium chromium-driver")
    browser_options = ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        browser_options.add_argument(argument)
    browser = Chrome(options=browser_options, service=Service(driver))
    try:
        browser.get(options.url)
        wait = WebDriverWait(browser, WAIT_S, ignored_exceptions=[Exception])
        finished = "//tr[contains(., 'finished')]"
        wait.until(lambda _: browser.find_element(By.XPATH, finished))
        browser.find_element(By.XPATH, finished).click()
        wait.until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, "#waterfall rect")) > 8)
        for name, (width, height, is_dark) in PICTURES.items():
            browser.set_window_size(width, height)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            browser.execute_script("window.scrollTo(0, 0)")
            file = options.directory / f"{name}.png"
            browser.save_screenshot(str(file))
            print(file)
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
