/** Reads its bootstrap and ends: what is looked at is its launch. */

import { start } from "./client.mjs";

start();
