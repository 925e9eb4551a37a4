/** Leaves three files to be published, one of them longer than a page. */

import { writeFileSync } from "node:fs";

import { start } from "./client.mjs";

const { input } = start();
for (const name of input.files) writeFileSync(`out/${name}`, `${name}\n`.repeat(1000), { flush: true });
